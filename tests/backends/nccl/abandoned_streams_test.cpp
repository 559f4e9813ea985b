// Gathers by copy engines don't end when their communicator is aborted. Nothing of the device is freed then, since a
// free would wait for them; the fake complains about one.
#include <mutex>

#include "tests/backends/nccl/support.h"

namespace tessera::nccl_test {
namespace {

constexpr std::size_t kBytes = std::size_t{4} << 20;

View view_in(const Buffer& buffer, int device, std::size_t count) {
  return {buffer.data(), count, dtype_of<float>, {DeviceType::cuda, device}};
}

struct Outcome {
  std::string error;  ///< of rank 0
  std::vector<std::string> leaks;
};

/// Rank 1 does not come to the second gather of a communicator for gathers.
Outcome gather_alone(bool waits) {
  Outcome outcome;
  std::mutex mutex;
  BackendOptions options = quick_options();
  options.communicator.logger = std::make_shared<Logger>(LogLevel::warn, [&](LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (text.find("leaked") != std::string_view::npos) outcome.leaks.emplace_back(text);
  });
  reset_fake();
  run_world(2, options, [&](Communicator& world) {
    const auto child = world.split(0, world.rank(), {.for_gathers = true});
    const auto other = world.split(0, -world.rank());
    const Buffer in = child->allocate_symmetric(kBytes, MemoryKind::device, {});
    const Buffer out = child->allocate_symmetric(2 * kBytes, MemoryKind::device, {});
    const Buffer small = world.allocate(8, MemoryKind::device, {});
    const auto gather = [&] {
      return child->all_gather(view_in(in, world.rank(), kBytes / 4), view_in(out, world.rank(), kBytes / 2),
                               {.timeout = 300ms});
    };
    gather().wait();
    if (world.rank() == 1) return std::this_thread::sleep_for(1s);
    FakeDeviceStream stream(0);
    outcome.error = error_of([&] {
      Work work = gather();
      if (waits) return work.wait();
      std::this_thread::sleep_for(1s);  // the watching thread finds that it is late
    });
  });
  return outcome;
}

TEST(NcclAbandonedStreams, KeepsWhatAGatherByCopyEnginesUses) {
  const ScopedVariable wanted("TESSERA_NCCL_COPY_ENGINES", "1");
  for (const bool waits : {true, false}) {
    const Outcome outcome = gather_alone(waits);
    EXPECT_EQ(fake_counts().complaint, "");
    EXPECT_GE(fake_counts().blocks, 3);
    EXPECT_GE(fake_counts().streams, 1);
    EXPECT_EQ(outcome.leaks,
              std::vector<std::string>(1,
                                       "nccl: a stream has not ended after an abort: what it may use is leaked, "
                                       "since a free would wait for the device"));
    if (waits) {
      EXPECT_TRUE(outcome.error.ends_with("(and the device has not stopped: its memory may still change)"))
          << outcome.error;
    }
  }
}

/// The control: an abort ends the kernels of other gathers.
TEST(NcclAbandonedStreams, FreesWhatOtherGathersUse) {
  const Outcome outcome = gather_alone(true);
  EXPECT_EQ(fake_counts().complaint, "");
  EXPECT_EQ(outcome.leaks, std::vector<std::string>());
  EXPECT_TRUE(outcome.error.starts_with("Timeout: all_gather #2: not done within 300ms")) << outcome.error;
  EXPECT_TRUE(all_freed());
}

}  // namespace
}  // namespace tessera::nccl_test
