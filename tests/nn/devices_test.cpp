// The same training on other devices: only kernels and copies access a tensor's memory.
#include <gtest/gtest.h>

#include "tests/harness/guarded_device.h"
#include "tests/nn/device_training.h"

namespace tessera::nn::test {
namespace {

class Devices : public testing::TestWithParam<const char*> {};

TEST_P(Devices, HostAccessesNoDeviceMemory) {
  Context host, guarded({.threads = 2, .runtime = harness::make_guarded_device()});
  EXPECT_EQ(train(GetParam(), guarded), train(GetParam(), host));
  EXPECT_EQ(guarded.device().type, DeviceType::cuda);
}

TEST_P(Devices, MetaRunNeedsSameMemory) {
  Context host, meta({.device = {DeviceType::meta, 0}});
  train(GetParam(), host);
  train(GetParam(), meta, false);
  const auto real = host.memory_tracker().snapshot(), planned = meta.memory_tracker().snapshot();
  EXPECT_EQ(planned.peak, real.peak);
  EXPECT_EQ(planned.total_peak, real.total_peak);
  EXPECT_EQ(planned.reserved, real.reserved);
  EXPECT_GT(planned.total_peak, 1'000'000U);
}

/// Rows of logits that are padded (256 tokens are no multiple of 96) change no bit, and show in the memory of both.
TEST_P(Devices, PaddedLogitsChangeMemoryOnly) {
  Context packed, host({.row_multiple = 96}), meta({.device = {DeviceType::meta, 0}, .row_multiple = 96});
  EXPECT_EQ(host.padded_row(256), 288);
  EXPECT_EQ(train(GetParam(), host), train(GetParam(), packed));
  train(GetParam(), meta, false);
  const auto real = host.memory_tracker().snapshot(), planned = meta.memory_tracker().snapshot();
  EXPECT_EQ(planned.peak, real.peak);
  EXPECT_EQ(planned.total_peak, real.total_peak);
  // 63 rows of logits. In the model of several dtypes the peak is elsewhere.
  const std::uint64_t padding = std::string(GetParam()) == "mixed" ? 0 : 63 * 32 * sizeof(float);
  const auto activations = [](const base::MemoryTracker::Snapshot& of) {
    return of.peak_of(MemoryCategory::activation);
  };
  EXPECT_EQ(activations(real), activations(packed.memory_tracker().snapshot()) + padding);
}

INSTANTIATE_TEST_SUITE_P(Models, Devices, testing::Values("gpt-nano", "llama-nano", "mixed"),
                         [](const auto& given) { return std::string(given.param).substr(0, 3); });

TEST(GuardedDevice, DetectsHostAccess) {
  Context context({.runtime = harness::make_guarded_device()});
  const Tensor x = Tensor::zeros(context, {3}, DType::f32);
  EXPECT_DEATH(x.data<float>()[0] = 1.0F, "");
  const Tensor one = Tensor::zeros(context, {}, DType::f32);
  EXPECT_EQ(one.item(), 0.0);
}

/// So that all suites on it show that nothing asks for times of events that have none on a real device.
TEST(GuardedDevice, HasTimesOfTimedEventsOnly) {
  for (const bool lazy : {false, true}) {
    const auto stream = harness::make_guarded_device({.lazy = lazy})->make_stream();
    EXPECT_GT(stream->record_timed().time_ns(), 0);
    EXPECT_THROW(stream->record().time_ns(), InvalidUsage);
  }
}

/// So that all suites on it show that ranks share nothing else.
TEST(GuardedDevice, SharesWholeAllocationsOnly) {
  const auto device = harness::make_guarded_device();
  auto* const data = static_cast<std::byte*>(device->allocate(4096));
  EXPECT_NO_THROW(device->get_ipc_handle(data, 4096));
  EXPECT_THROW(device->get_ipc_handle(data + 256, 256), InvalidUsage);
  device->free(data, 4096);
  EXPECT_THROW(device->get_ipc_handle(data, 4096), InvalidUsage);
}

TEST(MetaDevice, RejectsReads) {
  Context context({.device = {DeviceType::meta, 0}});
  const Tensor x = Tensor::zeros(context, {}, DType::f32);
  EXPECT_THROW(x.item(), InvalidUsage);
  EXPECT_DEATH(x.data<float>()[0] = 1.0F, "");
  // Memory is tracked but not allocated.
  const Tensor huge = Tensor::empty(context, {1 << 20, 1 << 20}, DType::f32);
  EXPECT_EQ(context.memory_tracker().snapshot().now_of(MemoryCategory::activation), (std::uint64_t{1} << 42U) + 4);
}

}  // namespace
}  // namespace tessera::nn::test
