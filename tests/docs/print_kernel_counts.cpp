// Prints the kernel calls of one training step of gpt2 (124 million parameters) in bf16 with 16 x 1024 tokens on one
// GPU, a JSON line for each kind and size: calls, the bytes and operations of one call, and the launches of all of
// them.
//
// Bytes and operations are those that the engine passes to a KernelInterceptor, in a step on shapes without data.
// Launches are those of the CUDA kernels in an emulated step of a smaller model, per call of a kind.
#include <exception>
#include <iostream>
#include <map>
#include <string>
#include <tuple>

#include "tessera/fsdp/nn_model.h"
#include "tessera/plan/simulation.h"
#include "tessera/plan/world.h"
#include "tests/harness/guarded_device.h"
#include "tests/harness/training.h"
#include "tests/nn/ops/cuda/emulated_kernels.h"

namespace {

using namespace tessera;

using Kind = std::pair<std::string, base::DType>;

fsdp::EngineOptions engine_options() {
  fsdp::EngineOptions options = harness::engine_for("ddp");
  options.optimizer.kind = nn::OptimizerConfig::Kind::adamw;
  options.clip_norm = 1;
  return options;
}

std::unique_ptr<nn::CausalModel> bf16_model(nn::Context& context, const nn::ModelConfig& config) {
  auto model = nn::make_model(context, config);
  model->set_dtype(base::DType::bf16);
  return model;
}

/// Kind, columns of a product's result (0: no product), bytes read and written, operations.
using Call = std::tuple<Kind, std::int64_t, double, double, double>;

class CallCounter final : public nn::KernelInterceptor {
 public:
  void call(const nn::KernelInvocation& call, base::Stream& /*stream*/, const std::function<void()>& run) override {
    run();
    const double operations = call.product.count > 0 ? call.size : 0;
    ++counts[{{std::string(call.kernel), call.dtype}, call.product.n, call.reads, call.writes, operations}];
  }
  bool splits_sums() const override { return false; }
  std::map<Call, int> counts;
};

std::map<Call, int> calls_of_steps(int steps) {
  const plan::TrainingStep step{
      .make_task =
          [](nn::Context& context) { return plan::make_token_task(bf16_model(context, nn::preset("gpt2")), 1024); },
      .samples = 16,
      .engine = engine_options()};
  plan::VirtualClock clock(plan::VirtualClock::Machine::asynchronous);
  const auto world = plan::make_world(1, clock, plan::alpha_beta(std::chrono::microseconds(1), 1e9));
  CallCounter counter;
  plan::predict_step(step, *world, clock, counter, steps);
  return counter.counts;
}

class LaunchCounter final : public nn::KernelInterceptor {
 public:
  void call(const nn::KernelInvocation& call, base::Stream& /*stream*/, const std::function<void()>& run) override {
    const std::size_t before = nn::test::kernel_launches();
    run();
    auto& [calls, launches] = counts[{std::string(call.kernel), call.dtype}];
    ++calls;
    launches += nn::test::kernel_launches() - before;
    // The emulation runs these outside of kernels.
    if (call.kernel.starts_with("linear")) launches += static_cast<std::size_t>(call.product.count);
    if (call.kernel.starts_with("copy") || call.kernel == "clear") ++launches;
  }
  bool splits_sums() const override { return false; }
  std::map<Kind, std::pair<std::size_t, std::size_t>> counts;  // calls, launches
};

/// The second step of a small model with gpt2's vocabulary and context, whose digits cost launches of sorts.
std::map<Kind, std::pair<std::size_t, std::size_t>> emulated_launches() {
  harness::TrainingSpec spec;
  spec.model = nn::preset("gpt2");
  spec.model.layers = 1, spec.model.width = 64, spec.model.heads = spec.model.kv_heads = 1;
  spec.model.hidden = 256;
  spec.seq_len = 16, spec.global_batch = 1, spec.ranks = 1;
  LaunchCounter counter;
  comm::InitOptions config;
  config.backend = "shm";
  comm::run_threads(1, config, [&](comm::Communicator& world) {
    nn::Context context(
        {.memory_tracker = world.memory_tracker(),
         .runtime = nn::observe(harness::make_guarded_device({.kernels = nn::test::make_emulated_kernels}), counter)});
    const auto model = bf16_model(context, spec.model);
    fsdp::Engine engine(*model, world, engine_options());
    engine.initialize(0);
    for (int step = 0; step < 2; ++step) {
      const harness::TokenBatch batch = harness::make_batch(context, spec, step, 0);
      nn::Tensor positions = nn::Tensor::empty(context, {16}, base::DType::i32);
      counter.counts.clear();
      context.device_kernels().positions(context.stream(), positions.data<std::int32_t>(), 16, 16);
      harness::forward_backward(*model, batch);
      engine.step(1e-3);
    }
    engine.wait();
  });
  return counter.counts;
}

void print() {
  const auto launches = emulated_launches();
  const std::map<Call, int> one = calls_of_steps(1);
  for (auto [call, calls] : calls_of_steps(2)) {  // what the second step adds
    const auto before = one.find(call);
    if (before != one.end()) calls -= before->second;
    if (calls == 0) continue;
    const auto& [kind, columns, reads, writes, operations] = call;
    const auto found = launches.find(kind);
    if (found == launches.end()) throw base::InvalidUsage("the emulated step does not call " + kind.first);
    const std::size_t all = found->second.second * static_cast<std::size_t>(calls) / found->second.first;
    std::cout << std::fixed << R"({"kernel": ")" << kind.first << R"(", "dtype": ")" << base::name_of(kind.second)
              << R"(", "calls": )" << calls << R"(, "launches": )" << all << R"(, "columns": )" << columns
              << R"(, "reads": )" << reads << R"(, "writes": )" << writes << R"(, "operations": )" << operations
              << "}\n";
  }
}

}  // namespace

int main() {
  try {
    print();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "print_kernel_counts: " << error.what() << "\n";
    return 1;
  }
}
