// Failures: every rank reports the first cause in time, no rank hangs, and no resource leaks.
#include <array>
#include <latch>

#include "tests/backends/nccl/support.h"

namespace tessera::nccl_test {
namespace {

using Clock = std::chrono::steady_clock;

/// Runs ranks that catch their errors, so that `body` throws on none.
void run_failing(int ranks, const std::function<void(Communicator&)>& body,
                 const comm::nccl::NcclApi& api = fake_api()) {
  EXPECT_EQ(run_world(ranks, quick_options(), body, api), std::vector<std::string>(static_cast<std::size_t>(ranks)));
}

void all_reduce(Communicator& comm, int device, OpOptions options = {}) {
  OnDevice<float> x(comm, device, 8, 1);
  comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), options).wait();
}

/// Reports a rank as lost on demand: ranks that are threads don't die alone.
class LosingBootstrap final : public Bootstrap {
 public:
  explicit LosingBootstrap(std::shared_ptr<Bootstrap> real) : real_(std::move(real)) {}
  void lose(int rank) const { lost_(rank); }

  int rank() const noexcept override { return real_->rank(); }
  int size() const noexcept override { return real_->size(); }
  bool in_process() const noexcept override { return real_->in_process(); }
  std::vector<std::string> all_gather(std::string_view blob) override { return real_->all_gather(blob); }
  std::unique_ptr<ControlChannel> open_channel(std::string_view name, ControlEvents events) override {
    lost_ = events.lost;
    return real_->open_channel(name, std::move(events));
  }
  const std::vector<std::string>& hosts() const noexcept override { return real_->hosts(); }
  const Token& token() const noexcept override { return real_->token(); }
  std::string local_address() const override { return real_->local_address(); }

 private:
  const std::shared_ptr<Bootstrap> real_;
  std::function<void(int)> lost_;
};

TEST(NcclFailure, HangingInitIsTimeout) {
  reset_fake({.init_hangs = true});
  BackendOptions options = quick_options();
  options.communicator.timeout = 300ms;
  const auto start = Clock::now();
  for (const std::string& error : run_world(2, options, [](Communicator&) {}))
    EXPECT_EQ(error, "Timeout: nccl: the communicator of 2 ranks was not ready within 300ms");
  EXPECT_LT(Clock::now() - start, 5s);
  EXPECT_TRUE(all_freed());
}

TEST(NcclFailure, AsynchronousErrorEndsWait) {
  reset_fake();
  run_failing(3, [](Communicator& comm) {
    all_reduce(comm, comm.rank());
    const std::string error = error_of([&] {
      comm.barrier().wait();  // other ranks may still be in it when the link breaks
      if (comm.rank() == 1) break_link(1, ncclInternalError);
      all_reduce(comm, comm.rank(), {.label = "block.3"});
    });
    EXPECT_EQ(error.find("BackendError: "), 0u) << error;
    EXPECT_NE(error.find("nccl: asynchronous error: fake error (the last error of the fake)"), std::string::npos)
        << error;
    EXPECT_EQ(error_of([&] { comm.barrier(); }), error);  // the first cause is permanent
    EXPECT_EQ(error_of([&] { comm.split(0, 0); }), error);
  });
  EXPECT_TRUE(all_freed());
}

TEST(NcclFailure, ErrorIsReportedWithoutWait) {
  reset_fake();
  run_failing(3, [](Communicator& comm) {
    comm.barrier().wait();
    if (comm.rank() == 2) return std::this_thread::sleep_for(4s);
    FakeDeviceStream stream(comm.rank());
    OnDevice<float> x(comm, comm.rank(), 8, 1);
    const auto start = Clock::now();
    comm.all_reduce(x.view(), x.view(), ReduceOp::sum()).wait_on(stream);
    if (comm.rank() == 1) break_link(1, ncclRemoteError);
    stream.synchronize();  // the kernels end when the communicator is aborted
    EXPECT_LT(Clock::now() - start, 10s);
    const std::string error = error_of([&] { comm.barrier(); });
    EXPECT_EQ(
        error,
        "BackendError: all_reduce #2: nccl: asynchronous error: remote process exited or there was a network error "
        "(the last error of the fake)");
  });
}

TEST(NcclFailure, TimeoutNamesRanksBehind) {
  reset_fake();
  run_failing(3, [](Communicator& comm) {
    comm.barrier().wait();
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(1500ms);
      EXPECT_TRUE(error_of([&] { comm.barrier(); }).starts_with("Timeout: ")) << "told by the others";
      return;
    }
    EXPECT_EQ(error_of([&] { all_reduce(comm, comm.rank(), {.timeout = 300ms, .label = "block.3"}); }),
              "Timeout: all_reduce #2 (block.3): not done within 300ms; rank 1 is behind at operation #1");
  });
  EXPECT_TRUE(all_freed());
}

TEST(NcclFailure, DeadlinesHoldWithStreamWaits) {
  reset_fake();
  run_failing(2, [](Communicator& comm) {
    comm.barrier().wait();
    if (comm.rank() == 1) return std::this_thread::sleep_for(1500ms);
    FakeDeviceStream stream(0);
    OnDevice<float> x(comm, 0, 8, 1);
    comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.timeout = 300ms}).wait_on(stream);
    stream.synchronize();
    EXPECT_EQ(error_of([&] { comm.barrier(); }),
              "Timeout: all_reduce #2: not done within 300ms; rank 1 is behind at operation #1");
  });
}

TEST(NcclFailure, CheckedModeComparesCalls) {
  for (const bool check : {true, false}) {
    reset_fake();
    BackendOptions options = quick_options();
    options.check = check;
    run_world(2, options, [&](Communicator& comm) {
      all_reduce(comm, comm.rank());
      comm.split(0, 0)->barrier().wait();
      OnDevice<float> x(comm, comm.rank(), 12, 1);
      const std::size_t count = comm.rank() == 0 ? 10 : 12;
      const std::string error = error_of(
          [&] { comm.all_reduce(x.view(0, count), x.view(0, count), ReduceOp::max(), {.timeout = 500ms}).wait(); });
      if (check) {
        EXPECT_EQ(error,
                  "Mismatch: operation #3 differs between the ranks: rank 0: all_reduce of 10 f32 max; rank 1: "
                  "all_reduce of 12 f32 max");
      } else {  // NCCL hangs
        EXPECT_EQ(error, "Timeout: all_reduce #3: not done within 500ms; all ranks respond, and it is still under way");
      }
    });
  }
}

TEST(NcclFailure, UnmatchedMessageIsTimeout) {
  reset_fake();
  run_failing(3, [](Communicator& comm) {
    OnDevice<float> x(comm, comm.rank(), 8, 1);
    if (comm.rank() == 0)
      EXPECT_EQ(error_of([&] { comm.recv(x.view(), 2, {.timeout = 300ms}).wait(); }),
                "Timeout: recv from rank 2: not done within 300ms; rank 2 has not posted the matching send or receive");
    else
      std::this_thread::sleep_for(1000ms);
  });
}

TEST(NcclFailure, AbortFromOtherThreadReachesAllRanks) {
  reset_fake();
  run_failing(3, [](Communicator& comm) {
    comm.barrier().wait();
    std::thread other;
    if (comm.rank() == 2) {
      other = std::thread([&] {
        std::this_thread::sleep_for(100ms);
        comm.abort("enough");
      });
      const std::string error = error_of([&] {
        OnDevice<float> x(comm, 2, 8, 1);
        comm.recv(x.view(), 0).wait();  // no matching send
      });
      EXPECT_EQ(error, "Aborted: rank 2 aborted: enough");
      other.join();
    } else {
      EXPECT_EQ(error_of([&] { all_reduce(comm, comm.rank()); }), "Aborted: rank 2 aborted: enough");
    }
  });
  EXPECT_TRUE(all_freed());
}

TEST(NcclFailure, FailureOfSplitKeepsOthersUsable) {
  reset_fake();
  run_ranks(4, [](Communicator& world) {
    const auto half = world.split(world.rank() / 2, 0);
    const std::string error = error_of([&] {
      half->barrier().wait();  // rank 1 may still be in it
      if (world.rank() == 0) half->abort("only us");
      all_reduce(*half, world.rank());
    });
    EXPECT_EQ(error, world.rank() < 2 ? "Aborted: rank 0 aborted: only us" : "");
    all_reduce(world, world.rank());
  });
}

/// Rank 1, or the first member, which makes the key, does not come.
TEST(NcclFailure, GroupNamesMemberThatDoesNotCome) {
  for (const int absent : {0, 1}) {
    reset_fake();
    const auto errors = run_world(3, quick_options(), [&](Communicator& world) {
      world.barrier().wait();
      if (world.rank() == absent) {
        std::this_thread::sleep_for(1500ms);
        return;
      }
      const std::string error = error_of([&] { world.create_group(std::array{0, 1, 2}, {.timeout = 300ms}); });
      EXPECT_EQ(error, "Timeout: create_group: nccl: the communicator of 3 ranks was not ready within 300ms: rank " +
                           std::to_string(absent) + " has not called it");
      EXPECT_EQ(error_of([&] { world.barrier(); }), error);
    });
    EXPECT_EQ(errors, std::vector<std::string>(3));
    EXPECT_EQ(fake_counts().complaint, "");
    EXPECT_TRUE(all_freed());
  }
}

TEST(NcclFailure, RankThatClosedIsNotAwaited) {
  reset_fake();
  const auto start = Clock::now();
  const auto errors = run_world(2, quick_options(), [](Communicator& comm) {
    comm.barrier().wait();
    if (comm.rank() == 1) comm.barrier().wait();
  });
  EXPECT_EQ(errors[0], "");
  EXPECT_EQ(errors[1], "PeerLost: barrier #2: rank 0 has closed its communicator");
  EXPECT_LT(Clock::now() - start, 15s);
}

/// A broken connection comes with an error of NCCL's and with the name of the rank that is gone: the name is reported.
TEST(NcclFailure, ReportsRankInsteadOfRemoteError) {
  reset_fake();
  std::latch both_ready(2);
  std::latch broken(2);
  const auto errors = run_world(2, quick_options(), [&](Communicator& comm) {
    comm.barrier().wait();
    both_ready.arrive_and_wait();
    if (comm.rank() == 1) break_link(1, ncclRemoteError);
    broken.arrive_and_wait();
    if (comm.rank() == 0) return std::this_thread::sleep_for(100ms);  // then it closes its communicator
    comm.barrier().wait();
  });
  EXPECT_EQ(errors[1], "PeerLost: barrier #2: rank 0 has closed its communicator");
}

TEST(NcclFailure, NamesRankThatDied) {
  reset_fake();
  std::vector<std::future<void>> ranks;
  for (const auto& real : make_thread_bootstraps(3, 20s))
    ranks.push_back(std::async(std::launch::async, [real] {
      const auto bootstrap = std::make_shared<LosingBootstrap>(real);
      const auto comm = comm::nccl::make_world(bootstrap, quick_options(), fake_api());
      const std::string error = error_of([&] {
        comm->barrier().wait();  // other ranks may still be in it when rank 0 reports the failure
        if (comm->rank() == 2) return comm->recv(OnDevice<float>(*comm, 2, 8).view(), 0).wait();
        Work work = comm->barrier();
        if (comm->rank() == 0) bootstrap->lose(2);
        work.wait();
      });
      EXPECT_EQ(error, "PeerLost: barrier #2: rank 2 died");  // rank 0 notifies the others
    }));
  for (auto& rank : ranks) rank.get();
  EXPECT_TRUE(all_freed());
}

TEST(NcclFailure, AbandonsHangingAbort) {
  reset_fake({.abort_hangs = true});
  std::thread release([] {
    std::this_thread::sleep_for(8s);  // longer than every timeout
    change_fake({});
  });
  const auto start = Clock::now();
  run_failing(2, [&](Communicator& comm) {
    if (comm.rank() == 1) return std::this_thread::sleep_for(1s);
    OnDevice<float> x(comm, 0, 8, 1);
    const std::string error =
        error_of([&] { comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), {.timeout = 100ms}).wait(); });
    EXPECT_TRUE(error.starts_with("Timeout: all_reduce #1: not done within 100ms; rank 1 is behind at operation #0"));
    EXPECT_TRUE(error.ends_with("(and the device has not stopped: its memory may still change)")) << error;
    EXPECT_LT(Clock::now() - start, 7500ms);
  });
  release.join();
  std::this_thread::sleep_for(500ms);  // the abandoned threads return
}

TEST(NcclFailure, LibraryErrorIsBackendErrorWithItsText) {
  static const comm::nccl::NcclApi failing = [] {
    comm::nccl::NcclApi api = fake_api();
    api.ncclAllGather = [](const void*, void*, std::size_t, ncclDataType_t, ncclComm_t, cudaStream_t) {
      return ncclInvalidArgument;
    };
    return api;
  }();
  reset_fake();
  run_failing(
      1,
      [](Communicator& comm) {
        OnDevice<float> x(comm, 0, 8, 1);
        EXPECT_EQ(error_of([&] { comm.all_gather(x.view(), x.view()).wait(); }),
                  "BackendError: all_gather #1: nccl: ncclAllGather: fake error (the last error of the fake)");
      },
      failing);
  EXPECT_TRUE(all_freed());
}

}  // namespace
}  // namespace tessera::nccl_test
