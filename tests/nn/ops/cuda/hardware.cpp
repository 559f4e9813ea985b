// Makes the tests of this folder run on a real device; without one all are skipped with the reason.
#include <gtest/gtest.h>

#include "tessera/base/device_runtime.h"
#include "tests/nn/ops/cuda/emulated_kernels.h"

namespace tessera::nn::test {

void set_thread_order(int) {}  // the hardware's own

namespace {

class Hardware : public testing::Environment {
 public:
  void SetUp() override {
    for (const base::DeviceInfo& state : base::list_devices())
      if (state.name == "cuda" && !state.available) GTEST_SKIP() << "no CUDA device: " << state.reason;
  }
};
[[maybe_unused]] testing::Environment* const kHardware = testing::AddGlobalTestEnvironment(new Hardware);

}  // namespace
}  // namespace tessera::nn::test
