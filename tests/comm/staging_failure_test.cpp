// Failures with device memory on the host's backends: every rank reports them, streams continue, and nothing is written
// afterwards.
#include <atomic>
#include <latch>
#include <mutex>
#include <thread>

#include "tests/comm/staging_support.h"

namespace tessera::comm_test {
namespace {

/// A device whose copies need a lock, as a vendor's calls do: a call that synchronizes holds it until the streams have
/// come to it.
class LockedDevice final : public DeviceRuntime {
 public:
  explicit LockedDevice(std::shared_ptr<DeviceRuntime> inner)
      : DeviceRuntime(inner->device(), inner->traits()), inner_(std::move(inner)) {}
  std::mutex& lock() { return lock_; }

  DeviceProperties properties() const override { return inner_->properties(); }
  std::unique_ptr<Stream> make_stream() override { return inner_->make_stream(); }
  std::unique_ptr<Stream> make_copy_stream() override { return inner_->make_copy_stream(); }
  std::unique_ptr<HostEvent> make_signal() override { return inner_->make_signal(); }
  void* allocate(std::size_t bytes) override { return inner_->allocate(bytes); }
  void free(void* data, std::size_t bytes) noexcept override { inner_->free(data, bytes); }
  IpcMemoryHandle get_ipc_handle(void* data, std::size_t bytes) override { return inner_->get_ipc_handle(data, bytes); }
  void* open_ipc_handle(const IpcMemoryHandle& handle) override { return inner_->open_ipc_handle(handle); }
  void close_ipc_handle(void* imported) noexcept override { inner_->close_ipc_handle(imported); }
  void* allocate_host(std::size_t bytes) override { return inner_->allocate_host(bytes); }
  void free_host(void* data, std::size_t bytes) noexcept override { inner_->free_host(data, bytes); }
  void copy(Stream& stream, CopyDirection direction, void* to, const void* from, std::size_t bytes) override {
    const std::lock_guard hold(lock_);
    inner_->copy(stream, direction, to, from, bytes);
  }
  void fill(Stream& stream, void* data, unsigned char value, std::size_t bytes) override {
    inner_->fill(stream, data, value, bytes);
  }
  void synchronize() override { inner_->synchronize(); }
  const void* find(std::string_view interface) const noexcept override { return inner_->find(interface); }

 private:
  const std::shared_ptr<DeviceRuntime> inner_;
  std::mutex lock_;
};

class StagingFailure : public testing::TestWithParam<const char*> {};

TEST_P(StagingFailure, StalledStreamIsTimeoutWithoutHang) {
  const auto device = lazy_device();
  run_staged(GetParam(), 3, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values x(comm, *device, *stream, 5000, 1);
    const auto never = device->make_signal();
    const auto stuck = device->make_stream();
    stuck->wait(never->arm());
    OpOptions options{.after = comm.rank() == 1 ? stuck.get() : stream.get(), .label = "block.3"};
    if (comm.rank() == 1) options.timeout = 300ms;
    const auto start = std::chrono::steady_clock::now();
    const std::string error = error_of([&] { comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), options).wait(); });
    EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
    const std::string why = "all_reduce (block.3): its stream did not reach the operation within 300ms";
    if (comm.rank() == 1) {
      EXPECT_EQ(error, "Timeout: " + why);
    } else {
      EXPECT_EQ(error, "Aborted: rank 1 aborted: " + why);
    }
    EXPECT_NE(error_of([&] { comm.barrier().wait(); }).find(why), std::string::npos);
    never->set();
  });
}

/// A call of the device holds a lock and waits for a stream that waits for an operation, whose copies need the lock.
TEST_P(StagingFailure, StuckDeviceIsTimeoutWithoutHang) {
  const auto device = std::make_shared<LockedDevice>(lazy_device());
  std::latch over(2);
  run_staged(GetParam(), 2, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values x(comm, *device, *stream, 50'000, 1);
    stream->synchronize();
    comm.barrier().wait();
    const std::string why = "all_reduce (block.3): the device did not respond within 300ms";
    if (comm.rank() == 0) {
      const auto gate = device->make_signal();
      const auto gated = device->make_stream();
      gated->wait(gate->arm());
      const auto start = std::chrono::steady_clock::now();
      Work work = comm.all_reduce(x.view(), x.view(), ReduceOp::sum(),
                                  {.after = gated.get(), .timeout = 300ms, .label = "block.3"});
      {
        const std::lock_guard hold(device->lock());
        gate->set();
        work.wait_on(*stream);
        stream->synchronize();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
      EXPECT_EQ(error_of([&] { work.wait(); }), "Timeout: " + why);
    } else {
      EXPECT_EQ(error_of([&] { comm.all_reduce(x.view(), x.view(), ReduceOp::sum()).wait(); }),
                "Aborted: rank 0 aborted: " + why);
    }
    EXPECT_NE(error_of([&] { comm.barrier().wait(); }).find(why), std::string::npos);
    over.arrive_and_wait();
  });
}

/// Where the device does not go on even then, its callers do.
TEST(StagingDeadline, DeviceThatNeverRespondsIsTimeout) {
  const auto device = std::make_shared<LockedDevice>(lazy_device());
  run_staged("shm", 1, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values x(comm, *device, *stream, 50'000, 1);
    stream->synchronize();
    const auto gate = device->make_signal();
    const auto gated = device->make_stream();
    gated->wait(gate->arm());
    const auto start = std::chrono::steady_clock::now();
    Work work = comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = gated.get(), .timeout = 300ms});
    std::unique_lock hold(device->lock());
    gate->set();
    std::this_thread::sleep_for(200ms);  // the communicator's thread starts the copy, so that this one can't
    EXPECT_EQ(error_of([&] { work.wait(); }),
              "Timeout: all_reduce: the device did not respond within 300ms (and the device has not stopped: its "
              "memory may still change)");
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
    hold.unlock();
  });
}

TEST_P(StagingFailure, FailureReleasesStreamsAndWritesNothing) {
  const auto device = lazy_device();
  std::atomic<int> failed{0};
  run_staged(GetParam(), 3, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    Values x(comm, *device, *stream, 50'000, 1);
    Values y(comm, *device, *stream, 50'000, 0);
    stream->synchronize();
    comm.barrier().wait();
    if (comm.rank() == 2) {
      while (failed.load() < 2) std::this_thread::sleep_for(10ms);
      return;  // behind: never issues it
    }
    Work work = comm.all_reduce(x.view(), y.view(), ReduceOp::sum(),
                                {.after = stream.get(), .timeout = 300ms, .label = "block.7"});
    Work queued =
        comm.all_gather(x.view(), View{y.view().data, 150'000, DType::f32, y.view().device}, {.timeout = 20s});
    work.wait_on(*stream);
    y.fill(7);
    const std::string error = error_of([&] { work.wait(); });
    EXPECT_TRUE(error.starts_with("Timeout: all_reduce")) << error;
    EXPECT_NE(error.find("(block.7)"), std::string::npos) << error;
    EXPECT_NE(error_of([&] { queued.wait(); }), "");
    stream->synchronize();  // the stream continues although the operation failed
    y.fill(8);
    stream->synchronize();
    std::this_thread::sleep_for(50ms);
    EXPECT_EQ(y.read(), std::vector<float>(50'000, 8));
    ++failed;
  });
}

TEST_P(StagingFailure, AbortReachesOperationsInFlightAndQueued) {
  const auto device = lazy_device();
  std::latch ready(2);  // not a barrier of comm: the abort may overtake its end on the other rank
  run_staged(GetParam(), 2, device, [&](Communicator& comm) {
    const auto stream = device->make_stream();
    const auto never = device->make_signal();
    Values x(comm, *device, *stream, 50'000, 1);
    stream->synchronize();
    ready.arrive_and_wait();
    if (comm.rank() == 0) {
      Work moving = comm.all_reduce(x.view(), x.view(), ReduceOp::sum());
      const auto stuck = device->make_stream();
      stuck->wait(never->arm());
      Work waiting = comm.recv(x.view(), 1, {.after = stuck.get()});
      std::thread([&] { comm.abort("enough"); }).join();
      EXPECT_EQ(error_of([&] { moving.wait(); }), "Aborted: rank 0 aborted: enough");
      EXPECT_EQ(error_of([&] { waiting.wait(); }), "Aborted: rank 0 aborted: enough");
      never->set();
    } else {
      EXPECT_EQ(error_of([&] { comm.recv(x.view(), 0).wait(); }), "Aborted: rank 0 aborted: enough");
    }
  });
}

TEST_P(StagingFailure, ExceptionOnOneRankFailsOthers) {
  const auto device = lazy_device();
  EXPECT_THROW(run_staged(GetParam(), 3, device,
                          [&](Communicator& comm) {
                            if (comm.rank() == 1) throw std::runtime_error("mine");
                            const auto stream = device->make_stream();
                            Values x(comm, *device, *stream, 50'000, 1);
                            comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.after = stream.get()}).wait();
                          }),
               std::runtime_error);
}

INSTANTIATE_TEST_SUITE_P(All, StagingFailure, testing::ValuesIn(kStagingKinds),
                         [](const auto& which) { return std::string(which.param); });

}  // namespace
}  // namespace tessera::comm_test
