// Makes the plans of attention with the real cuDNN for a GPU that is only described, without one. scripts/cudnn-plans
// builds and runs it.
//
//   cudnn_plans GENERATION
//
// Prints a line for each shape and direction; ends with 1 if one has no plan, or if a backward doesn't keep the
// gradient of the scores, as its deterministic form must.
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/cuda/cudnn_attention_graph.h"

namespace {

using namespace tessera::base;      // NOLINT: a program
using namespace tessera::nn::cuda;  // NOLINT

/// The vendor's description of a device, with the figures of an H100 (of an A100 for generation 80).
std::string description(int generation) {
  const bool is_ampere = generation < 90;
  return R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,"warpSize":32,)"
         R"("smCountOrigin":0,"maxSharedMemoryPerBlock":49152,"oversizedSharedMemoryPerBlock":0,)"
         R"("reservedSharedMemoryPerBlock":1024,"maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,)"
         R"("maxThreadsPerSM":2048,"pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1980000,)"
         R"("memClockRateKHz":2619000,"totalGlobalMem":84942979072,"l2CacheSize":52428800,"cudaDeviceId":0,)"
         R"("driverVer":13000,"deviceName":"described","multiProcessorCount":)" +
         std::to_string(is_ampere ? 108 : 132) + R"(,"maxSharedMemoryPerBlockOptin":)" +
         std::to_string(is_ampere ? 166912 : 232448) + R"(,"deviceVer":)" + std::to_string(generation * 10) + "}";
}

struct Shape {
  std::int64_t batch, positions, heads, kv_heads, dim;
};

/// Queries, keys and values in one tensor where they have the same heads, else in three.
CudnnAttentionProblem problem_of(const Shape& s, DType dtype, bool backward) {
  const auto rows = [&](std::int64_t heads) { return HeadsStrides{s.positions * heads * s.dim, heads * s.dim, s.dim}; };
  const HeadsStrides fused{s.positions * 3 * s.heads * s.dim, 3 * s.heads * s.dim, s.dim};
  CudnnAttentionProblem p;
  p.backward = backward, p.dtype = dtype, p.scale = 0.125F;
  p.batch = s.batch, p.positions = s.positions, p.heads = s.heads, p.kv_heads = s.kv_heads, p.dim = s.dim;
  p.q = s.heads == s.kv_heads ? fused : rows(s.heads);
  p.k = p.v = s.heads == s.kv_heads ? fused : rows(s.kv_heads);
  p.out = rows(s.heads);
  if (backward) p.dout = p.out, p.dq = p.q, p.dk = p.k, p.dv = p.v;
  return p;
}

/// True if there is a plan of the expected form.
bool report(const Cudnn& api, const CudnnDescriptor& device, const CudnnAttentionProblem& p) {
  std::printf(
      "%-4s %2lld x %4lld positions, %2lld heads over %2lld of %3lld, %-8s: ", p.dtype == DType::f16 ? "f16" : "bf16",
      static_cast<long long>(p.batch), static_cast<long long>(p.positions), static_cast<long long>(p.heads),
      static_cast<long long>(p.kv_heads), static_cast<long long>(p.dim), p.backward ? "backward" : "forward");
  CudnnGraph graph(api);
  add_attention(graph, p);
  const auto plan = graph.plan({.device = &device});
  if (!plan) return std::printf("no plan\n"), false;
  const auto gradient = static_cast<std::size_t>(p.batch * p.heads * p.positions * p.positions * 2);
  const bool is_kept = !p.backward || plan->workspace() >= gradient;
  std::printf("engine %lld, workspace %zu bytes%s\n", static_cast<long long>(plan->engine()), plan->workspace(),
              is_kept ? "" : ": the gradient of the scores is not kept");
  return is_kept;
}

}  // namespace

int main(int count, char** arguments) {
  try {
    if (count != 2) throw InvalidUsage("usage: cudnn_plans GENERATION, such as 90");
    const Cudnn& api = cudnn();
    require_version(api);
    std::printf("cuDNN %s, generation %s\n", version_text(api.cudnnGetVersion()).c_str(), arguments[1]);
    CudnnDescriptor device(api, CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
    const std::string text = description(std::atoi(arguments[1]));
    device.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR, std::span<const char>(text));
    device.finalize();
    bool good = true;
    for (const DType dtype : {DType::bf16, DType::f16})
      for (const Shape& shape : {Shape{16, 1024, 12, 12, 64},
                                 {8, 1024, 25, 25, 64},
                                 {2, 2048, 32, 8, 128},
                                 {3, 77, 4, 4, 40},
                                 {2, 130, 6, 1, 8},
                                 {1, 2, 2, 2, 128}})
        for (const bool backward : {false, true}) good &= report(api, device, problem_of(shape, dtype, backward));
    return good ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cudnn_plans: %s\n", error.what());
    return 1;
  }
}
