// Whole training steps on the emulated CUDA kernels, in memory that the host can't access; in a test of its own on
// hardware.
#include <gtest/gtest.h>

#include "tests/harness/guarded_device.h"
#include "tests/nn/device_training.h"
#include "tests/nn/ops/cuda/emulated_kernels.h"

namespace tessera::nn::test {
namespace {

class CudaTraining : public testing::TestWithParam<const char*> {};

ContextOptions device_options() {
#if defined(TESSERA_TEST_HARDWARE)
  return {.device = {DeviceType::cuda, 0}};
#else
  return {.runtime = harness::make_guarded_device({.kernels = make_emulated_kernels})};
#endif
}

TEST_P(CudaTraining, LossesEqualHost) {
  Context host, device(device_options());
  const Outcome expected = train(GetParam(), host), got = train(GetParam(), device);
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (std::size_t step = 0; step < got.losses.size(); ++step)
    EXPECT_NEAR(got.losses[step], expected.losses[step], 2e-5) << "step " << step + 1;
  EXPECT_NE(got.losses.front(), got.losses.back());
  // Element-wise kernels have the host's bits, sums another order: the first loss differs only in its last places.
  EXPECT_NEAR(got.losses.front(), expected.losses.front(), 1e-6);
}

/// Sums in another order round to other half-precision numbers.
TEST(CudaMixedTraining, LossesOfSeveralDtypesAreCloseToHost) {
  Context host, device(device_options());
  const Outcome expected = train("mixed", host), got = train("mixed", device);
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (std::size_t step = 0; step < got.losses.size(); ++step)
    EXPECT_NEAR(got.losses[step], expected.losses[step], 1e-2) << "step " << step + 1;
  EXPECT_LT(got.losses.back(), got.losses.front() - 0.05);
}

/// Codes have the host's bits; what they are made from was rounded to bf16 after sums in another order.
TEST(CudaFp8Training, LossesAreCloseToHost) {
  for (const char* name : {"fp8", "fp8-delayed"}) {
    Context host, device(device_options());
    if (!device.device_kernels().fp8_reason().empty()) GTEST_SKIP() << device.device_kernels().fp8_reason();
    const Outcome expected = train(name, host), got = train(name, device);
    ASSERT_EQ(got.losses.size(), expected.losses.size());
    for (std::size_t step = 0; step < got.losses.size(); ++step)
      EXPECT_NEAR(got.losses[step], expected.losses[step], 1e-2) << name << " step " << step + 1;
    EXPECT_LT(got.losses.back(), got.losses.front() - 0.05);
  }
}

#if !defined(TESSERA_TEST_HARDWARE)
Context planned(PlannedKernels kernels) { return Context({.device = {DeviceType::meta, 0}, .planned = kernels}); }

/// What a run without data says for a GPU without cuDNN, but for the scratch of sums over rows; and for one with it,
/// whose workspace is larger than that of the kernel here: the gradient of the scores, 64 x 128 for 21 x 21.
TEST(CudaTrainingMemory, IsPlannedWithoutDevice) {
  for (const char* name : {"gpt-nano", "odd", "mixed", "fp8"}) {
    Context device(device_options()), gpu = planned(PlannedKernels::gpu_without_cudnn),
                                      with_cudnn = planned(PlannedKernels::gpu), host = planned(PlannedKernels::host);
    train(name, device);
    for (Context* const context : {&gpu, &with_cudnn, &host}) train(name, *context, false);
    const auto total = [](Context& of) { return static_cast<double>(of.memory_tracker().snapshot().total_peak); };
    EXPECT_EQ(device.padded_row(257), gpu.padded_row(257));
    EXPECT_GT(total(gpu), 0.999 * total(device)) << name;
    EXPECT_LE(total(gpu), total(device)) << name;
    EXPECT_GE(total(with_cudnn), total(gpu)) << name;
    EXPECT_LE(total(with_cudnn), total(gpu) + 3 * 4 * 64 * 128 * 2) << name;
    if (std::string(name) == "mixed") {
      EXPECT_GT(total(host), 1.02 * total(gpu)) << "the control: f32 copies";
    }
  }
}

template <class T>
void expect_planned_scratch() {
  Context host, gpu = planned(PlannedKernels::gpu_without_cudnn);
  const auto kernels = make_emulated_kernels({host.runtime(), host.memory(), host.threads()});
  for (const std::size_t positions : {1, 63, 64, 65, 128, 129, 1000})
    for (const std::size_t dim : {8, 24, 64, 72, 128, 136})
      for (const auto& [scale, causal] : {std::pair(0.0, true), {-1.0, true}, {0.0, false}}) {
        const kernels::AttentionShape shape{3, positions, 6, 2, dim, scale, causal};
        EXPECT_EQ(gpu.device_kernels().of<T>()->attention_backward_scratch(shape),
                  kernels->of<T>()->attention_backward_scratch(shape))
            << positions << " positions, heads of " << dim << " elements of " << sizeof(T) << " bytes, scale " << scale
            << (causal ? ", causal" : "");
      }
}

TEST(CudaTrainingMemory, ScratchOfAttentionIsPlanned) {
  expect_planned_scratch<bf16>();
  expect_planned_scratch<float>();
  expect_planned_scratch<double>();
}

/// Peak of the activations of one backward without data, beyond those of this library's kernel.
template <class T>
double workspace_of_cudnn(const kernels::AttentionBackward<T>& args) {
  const auto peak = [&](PlannedKernels kernels) {
    Context context = planned(kernels);
    KernelTable<T>& table = *context.device_kernels().template of<T>();
    const Buffer scratch =
        context.memory().allocate(table.attention_backward_scratch(args.shape), MemoryCategory::activation);
    table.attention_backward(context.stream(), args);
    return static_cast<double>(context.memory_tracker().snapshot().total_peak);
  };
  return peak(PlannedKernels::gpu) - peak(PlannedKernels::gpu_without_cudnn);
}

TEST(CudaTrainingMemory, CudnnIsPlannedWhereItComputes) {
  const auto of = [](std::size_t positions, std::size_t dim) {
    return kernels::AttentionBackward<bf16>{.shape = {1, positions, 12, 12, dim}};
  };
  const kernels::AttentionBackward<bf16> usual = of(1024, 64);
  EXPECT_GT(workspace_of_cudnn(usual), 12 * 1024 * (1024 * 2 - 64 * 4 - 64));
  kernels::AttentionBackward<bf16> drops = usual, adds = usual;
  drops.dropout.probability = 0.1;
  adds.accumulate_dq = true;
  for (const auto& own : {drops, adds, of(1024, 60), of(1024, 136), of(16384, 64)})
    EXPECT_EQ(workspace_of_cudnn(own), 0) << own.shape.positions << " positions, heads of " << own.shape.dim;
  EXPECT_EQ(workspace_of_cudnn(kernels::AttentionBackward<float>{.shape = usual.shape}), 0);
}
#endif

INSTANTIATE_TEST_SUITE_P(Models, CudaTraining, testing::Values("gpt-nano", "llama-nano", "odd"),
                         [](const auto& given) { return std::string(given.param).substr(0, 3); });

}  // namespace
}  // namespace tessera::nn::test
