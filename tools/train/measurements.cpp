#include "tools/train/measurements.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

constexpr int kWarmUps = 3, kRepeats = 15;
constexpr std::array<std::size_t, 6> kBytes = {256, 2048, 16384, 65536, 131072, 262144};  // that each rank has
constexpr double kNoLimit = 1e15;  // bytes per second of links whose bytes take no time that shows

/// Microseconds of an all_gather, the median of several.
double gather_us(comm::Communicator& world, std::size_t bytes) {
  const base::Buffer in = world.allocate(bytes, comm::MemoryKind::host, base::MemoryCategory::communication);
  const base::Buffer out = world.allocate(bytes * static_cast<std::size_t>(world.size()), comm::MemoryKind::host,
                                          base::MemoryCategory::communication);
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kRepeats; ++i) {
    world.barrier().wait();
    const auto start = std::chrono::steady_clock::now();
    world.all_gather({in.data(), in.bytes(), base::DType::u8, {}}, {out.data(), out.bytes(), base::DType::u8, {}})
        .wait();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (i >= kWarmUps) times.push_back(time.count());
  }
  return median(std::move(times));
}

/// From the data sheets of NVIDIA, without sparsity: of products in fp8 (0: it has none) and in half precision, and in
/// f32 outside the tensor cores.
struct GpuPeak {
  std::string_view part_of_name;
  double fp8, half, single;
};
/// The first match counts.
constexpr std::array kGpuPeaks = {
    GpuPeak{"H100 PCIe", 1513e12, 756e12, 51e12}, GpuPeak{"H100 NVL", 1671e12, 835e12, 60e12},
    GpuPeak{"H100", 1979e12, 989e12, 67e12},      GpuPeak{"H200 NVL", 1671e12, 835e12, 60e12},
    GpuPeak{"H200", 1979e12, 989e12, 67e12},      GpuPeak{"A100", 0, 312e12, 19.5e12}};

}  // namespace

Evaluation evaluate(const TrainPlan& plan, fsdp::TrainingTask& task, comm::HostCollectives& control) {
  const std::int64_t count = task.evaluation_samples(), ranks = control.size();
  const std::int64_t at_once = std::max<std::int64_t>(1, plan.options.global_batch / ranks);
  double sums[2] = {0, 0};  // of losses, and of samples
  // Consecutive samples go to consecutive ranks.
  for (std::int64_t first = 0; first < count; first += at_once * ranks) {
    const std::int64_t begin = first + at_once * control.rank();
    const std::int64_t real = std::clamp<std::int64_t>(count - begin, 0, at_once);
    const double mean =
        task.evaluation_loss(real == 0 ? base::ElementRange{0, 1} : base::ElementRange{begin, begin + real});
    sums[0] += real == 0 ? 0 : mean * static_cast<double>(real);
    sums[1] += static_cast<double>(real);
  }
  if (ranks > 1) control.all_reduce(sums, 2, comm::ReduceOp::sum(), "eval");
  return {unsigned_nan(sums[0] / sums[1]), static_cast<std::int64_t>(sums[1]) * plan.seq_len};
}

std::string hash_parameters(fsdp::Engine& engine) {
  const std::unique_ptr<XXH3_state_t, XXH_errorcode (*)(XXH3_state_t*)> state(XXH3_createState(), XXH3_freeState);
  XXH3_128bits_reset(state.get());
  engine.state().for_each_parameter([&](const fsdp::Parameter&, std::span<const float> values) {
    XXH3_128bits_update(state.get(), values.data(), values.size_bytes());
  });
  XXH128_canonical_t bytes;
  XXH128_canonicalFromHash(&bytes, XXH3_128bits_digest(state.get()));
  return fmt::format("{:02x}", fmt::join(bytes.digest, ""));
}

LinkSpec fit_link(comm::Communicator& world) {
  if (world.size() == 1) return {0, kNoLimit};
  std::vector<double> times = each_of(kBytes, [&](std::size_t bytes) { return gather_us(world, bytes); });
  const comm::View view = comm::view_of(times.data(), times.size());
  world.all_reduce(view, view, comm::ReduceOp::max(), {.label = "link fit"}).wait();
  std::vector<FitPoint> points;
  for (std::size_t i = 0; i < kBytes.size(); ++i)
    points.push_back({static_cast<double>(kBytes[i] * static_cast<std::size_t>(world.size() - 1)), times[i]});
  const AlphaBetaFit fit = fit_alpha_beta(points).value();
  return {fit.alpha_us, fit.beta_us_per_byte > 0 ? 1e6 / fit.beta_us_per_byte : kNoLimit};
}

double model_flops_utilization(const TrainPlan& plan, double tokens_per_second, double peak_flops) {
  const nn::ModelConfig& model = plan.model;
  // The weights of a model with adapters are frozen: no product computes their gradients.
  const std::int64_t frozen = plan.lora ? nn::parameter_count(model) : 0;
  const double per_token = 6.0 * static_cast<double>(plan.parameters) - 2.0 * static_cast<double>(frozen) +
                           12.0 * static_cast<double>(model.layers * model.heads * model.head_dim * plan.seq_len);
  return per_token * tokens_per_second / peak_flops;
}

std::optional<double> peak_flops_of(std::string_view device, std::string_view dtype) {
  for (const GpuPeak& gpu : kGpuPeaks) {
    if (device.find(gpu.part_of_name) == std::string_view::npos) continue;
    const double peak = dtype == "fp8" ? gpu.fp8 : dtype == "f32" ? gpu.single : gpu.half;
    return peak > 0 ? std::optional(peak) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<double> peak_flops_of(const TrainPlan& plan) {
  if (plan.task) return std::nullopt;  // the operations of its step are not known
  if (plan.peak_flops) return plan.peak_flops;
  const base::Device device = device_of_rank(plan.options.device);
  if (device.type != base::DeviceType::cuda) return std::nullopt;
  for (const base::DeviceInfo& kind : base::list_devices())
    if (kind.name == "cuda" && static_cast<std::size_t>(device.index) < kind.devices.size())
      return peak_flops_of(kind.devices[static_cast<std::size_t>(device.index)].name, product_dtype_of(plan));
  return std::nullopt;
}

}  // namespace tessera::tools
