// Failures with device memory on the host's backends: every rank reports them, streams continue, and nothing is written
// afterwards.
#include <atomic>
#include <latch>
#include <thread>

#include "tests/comm/staging_support.h"

namespace tessera::comm_test {
namespace {

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
