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
/// What a run without data says for a GPU. It leaves out the scratch of sums over rows, and has attention by cuDNN,
/// whose workspace is larger than that of the kernel here: the gradient of the scores, 64 x 128 for 21 x 21.
TEST(CudaTrainingMemory, IsPlannedWithoutDevice) {
  for (const char* name : {"gpt-nano", "odd", "mixed", "fp8"}) {
    const ContextOptions without{.device = {DeviceType::meta, 0}, .planned = PlannedKernels::gpu};
    Context device(device_options()), gpu(without), host({.device = without.device});
    train(name, device);
    train(name, gpu, false);
    train(name, host, false);
    const auto total = [](Context& of) { return static_cast<double>(of.memory_tracker().snapshot().total_peak); };
    EXPECT_EQ(device.padded_row(257), gpu.padded_row(257));
    EXPECT_GT(total(gpu), 0.999 * total(device)) << name;
    EXPECT_LT(total(gpu), total(device) + 3 * 4 * 64 * 128 * 2) << name;
    if (std::string(name) == "mixed") {
      EXPECT_GT(total(host), 1.02 * total(gpu)) << "the control: f32 copies";
    }
  }
}
#endif

INSTANTIATE_TEST_SUITE_P(Models, CudaTraining, testing::Values("gpt-nano", "llama-nano", "odd"),
                         [](const auto& given) { return std::string(given.param).substr(0, 3); });

}  // namespace
}  // namespace tessera::nn::test
