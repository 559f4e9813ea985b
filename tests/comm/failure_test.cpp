// Failures with ranks as threads: every rank reports the first cause, and no rank hangs.
#include <barrier>
#include <thread>

#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

class Failure : public testing::TestWithParam<const char*> {
 protected:
  void run_ranks(int ranks, const std::function<void(Communicator&)>& body) {
    InitOptions config;
    config.backend = GetParam();
    config.check = true;
    config.timeout = 20s;
    run_threads(ranks, config, body);
  }
};

void all_reduce(Communicator& comm, std::size_t count, OpOptions options = {}) {
  std::vector<float> x(count, 1);
  comm.all_reduce(view_of(x.data(), count), view_of(x.data(), count), ReduceOp::sum(), options).wait();
}

TEST_P(Failure, AbortReachesAllRanksAndPersists) {
  for (const std::size_t count : {10u, 300'000u})
    run_ranks(3, [&](Communicator& comm) {
      if (comm.rank() == 2) {
        std::thread([&] { comm.abort("enough"); }).join();  // from another thread
      }
      const std::string error = error_of([&] { all_reduce(comm, count); });
      EXPECT_EQ(error, "Aborted: rank 2 aborted: enough");
      EXPECT_EQ(error_of([&] { comm.barrier().wait(); }), error);
    });
}

/// A call after a failure fails, even if it has all that it needs of its peers.
TEST_P(Failure, ReachesCallsThatPeersMadeBeforeIt) {
  using Start = std::function<Work(Communicator&, std::vector<float>&)>;
  const auto view = [](std::vector<float>& x) { return view_of(x.data(), x.size()); };
  const std::vector<std::pair<const char*, Start>> calls = {
      {"all_reduce", [&](Communicator& c, auto& x) { return c.all_reduce(view(x), view(x), ReduceOp::sum()); }},
      {"broadcast", [&](Communicator& c, auto& x) { return c.broadcast(view(x), view(x), 0); }},
      {"message", [&](Communicator& c, auto& x) { return c.rank() == 0 ? c.send(view(x), 1) : c.recv(view(x), 0); }}};
  for (const auto& call : calls)
    for (const std::size_t count : {4u, 300'000u}) {
      std::barrier aborted(2);
      run_ranks(2, [&](Communicator& comm) {
        std::vector<float> x(count, 1);
        Work work;
        if (comm.rank() == 0) {
          work = call.second(comm, x);
          comm.abort("enough");
        }
        aborted.arrive_and_wait();
        if (comm.rank() == 0) return;
        std::this_thread::sleep_for(200ms);  // until a connection has carried it
        EXPECT_EQ(error_of([&] { call.second(comm, x).wait(); }), "Aborted: rank 0 aborted: enough")
            << call.first << count;
      });
    }
}

TEST_P(Failure, ExceptionOnOneRankFailsOthers) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(3,
                         [](Communicator& comm) {
                           if (comm.rank() == 1) throw std::runtime_error("mine");
                           all_reduce(comm, 10);
                         }),
               std::runtime_error);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
}

TEST_P(Failure, TimeoutNamesOperationNumberAndRank) {
  for (const std::size_t count : {10u, 300'000u})
    run_ranks(3, [&](Communicator& comm) {
      comm.barrier().wait();
      if (comm.rank() == 1) {
        std::this_thread::sleep_for(1500ms);
        return;
      }
      const std::string error = error_of([&] { all_reduce(comm, count, {.timeout = 300ms, .label = "block.3"}); });
      EXPECT_EQ(error, "Timeout: all_reduce #2 (block.3): not done within 300ms; rank 1 is behind at operation #1");
    });
}

TEST_P(Failure, ReceiveFromAnyRankNamesAllThatCouldSend) {
  run_ranks(3, [](Communicator& comm) {
    if (comm.rank() > 0) {
      std::this_thread::sleep_for(1500ms);
      return;
    }
    std::vector<float> x(10);
    const std::string error =
        error_of([&] { comm.recv(view_of(x.data(), 10), kAnyRank, {.timeout = 300ms, .tag = 9}).wait(); });
    EXPECT_EQ(error,
              "Timeout: recv from any rank tag 9: not done within 300ms; rank 1 has not posted the matching send or "
              "receive; rank 2 has not posted the matching send or receive");
  });
}

TEST_P(Failure, ReceiveFromAnyRankFailsOnceAllOthersHaveLeft) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<float> x(10, static_cast<float>(comm.rank()));
    if (comm.rank() == 2) {
      std::this_thread::sleep_for(1500ms);  // rank 1 has left
      comm.send(view_of(x.data(), 10), 0).wait();
    }
    if (comm.rank() > 0) return;
    int source = -1;
    comm.recv(view_of(x.data(), 10), kAnyRank, {.source = &source}).wait();
    EXPECT_EQ(source, 2);
    EXPECT_EQ(x, std::vector<float>(10, 2));
    const auto start = std::chrono::steady_clock::now();
    const std::string error = error_of([&] { comm.recv(view_of(x.data(), 10), kAnyRank).wait(); });
    EXPECT_TRUE(error.starts_with("PeerLost: recv from any rank: rank ")) << error;
    EXPECT_NE(error.find("has closed its communicator"), std::string::npos) << error;
    EXPECT_LT(std::chrono::steady_clock::now() - start, 10s);
  });
}

/// A message of a tag that no receive awaits stays with its sender until another tag is awaited behind it.
TEST_P(Failure, MessageOfAnotherLengthIsMismatchAlsoWhenItCameEarly) {
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> x(10);
    if (comm.rank() == 0) {
      comm.send(view_of(x.data(), 10), 1, {.tag = 1}).wait();
      comm.send(view_of(x.data(), 10), 1, {.tag = 2}).wait();
      error_of([&] { comm.barrier().wait(); });
      return;
    }
    comm.recv(view_of(x.data(), 10), 0, {.tag = 2}).wait();
    const std::string error = error_of([&] { comm.recv(view_of(x.data(), 9), 0, {.tag = 1}).wait(); });
    EXPECT_TRUE(error.starts_with("Mismatch: recv ")) << error;
  });
}

TEST_P(Failure, DifferentCallsAreMismatchWithTable) {
  run_ranks(2, [](Communicator& comm) {
    const std::string error = error_of([&] { all_reduce(comm, comm.rank() == 0 ? 10 : 12); });
    EXPECT_EQ(error,
              "Mismatch: operation #1 differs between the ranks: rank 0: all_reduce of 10 f32 sum; rank 1: all_reduce "
              "of 12 f32 sum");
  });
  run_ranks(2, [](Communicator& comm) {
    const std::string error = error_of([&] {
      if (comm.rank() == 0) all_reduce(comm, 300'000);
      comm.barrier().wait();
    });
    EXPECT_TRUE(error.starts_with("Mismatch")) << error;
    EXPECT_NE(error.find("rank 1: barrier"), std::string::npos) << error;
  });
  run_ranks(2, [](Communicator& comm) {
    std::vector<float> x(10);
    const std::string error = error_of([&] {
      if (comm.rank() == 0) comm.send(view_of(x.data(), 10), 1).wait();
      if (comm.rank() == 1) comm.recv(view_of(x.data(), 9), 0).wait();
      comm.barrier().wait();
    });
    if (GetParam() == std::string("shm")) {
      EXPECT_EQ(error, "Mismatch: recv #1 from rank 0: the sender passed 10 elements of f32, expected 9 of f32");
    } else {
      EXPECT_EQ(error.substr(0, error.find(':', 10)), "Mismatch: recv from rank 0 #1") << error;
      EXPECT_NE(error.find("rank 0 sent 40 bytes where another number was expected"), std::string::npos) << error;
    }
  });
}

TEST_P(Failure, FailedSplitKeepsOtherCommunicatorsUsable) {
  run_ranks(4, [](Communicator& world) {
    const auto half = world.split(world.rank() / 2, 0);
    if (world.rank() == 3) half->abort("only us");
    const std::string error = error_of([&] { all_reduce(*half, 10); });
    EXPECT_EQ(error, world.rank() < 2 ? "" : "Aborted: rank 1 (global rank 3) aborted: only us");
    all_reduce(world, 100'000);
  });
}

/// Checked mode compares collectives only: a message concerns two ranks, whatever used its slot before.
TEST_P(Failure, MessageAfterCollectiveConcernsTwoRanks) {
  run_ranks(3, [](Communicator& comm) {
    for (int round = 0; round < 3; ++round) {
      all_reduce(comm, 10);
      std::uint8_t x = 7;
      Work work;
      if (comm.rank() == 0) work = comm.send(view_of(&x, 1), 1);
      if (comm.rank() == 1) work = comm.recv(view_of(&x, 1), 0);
      EXPECT_TRUE(work.wait_for(2s));
    }
  });
}

/// Data that a failed communicator leaves behind does not affect other communicators.
TEST_P(Failure, SurvivesManyFailedSplitsWithUnreceivedMessages) {
  run_ranks(2, [](Communicator& world) {
    const auto sibling = world.split(0, 0);
    for (int round = 0; round < 20; ++round) {
      const auto part = world.split(0, 0);
      std::vector<std::uint8_t> x(60'000);
      std::vector<Work> sends;
      std::string error;
      if (world.rank() == 0) {
        for (int i = 0; i < 8; ++i) sends.push_back(part->send(view_of(x.data(), x.size()), 1));
        error = error_of([&] { part->recv(view_of(x.data(), 9), 1, {.timeout = 20ms}).wait(); });
      } else {
        error = error_of([&] { part->barrier().wait(); });
      }
      EXPECT_TRUE(error.starts_with("Timeout: recv from rank 1")) << error;
      sends.clear();
      all_reduce(*sibling, 300'000);
    }
    // A small message still uses the eager protocol.
    std::vector<std::uint8_t> x(60'000);
    Work work;
    if (world.rank() == 0) work = sibling->send(view_of(x.data(), x.size()), 1);
    EXPECT_TRUE(work.wait_for(1s));
    world.barrier().wait();
    if (world.rank() == 1) sibling->recv(view_of(x.data(), x.size()), 0).wait();
    for (int i = 0; i < 20; ++i) all_reduce(*sibling, 1'000'000);
  });
}

TEST_P(Failure, RankThatClosedIsNotAwaited) {
  run_ranks(2, [](Communicator& comm) {
    comm.barrier().wait();
    if (comm.rank() == 0) return;
    const std::string error = error_of([&] { comm.barrier().wait(); });
    EXPECT_EQ(error, "PeerLost: barrier #2: rank 0 has closed its communicator");
  });
}

TEST_P(Failure, ClosingRankReportsEarlierFailure) {
  run_ranks(2, [](Communicator& world) {
    const auto other = world.split(0, world.rank());
    if (world.rank() == 0) return other->abort("enough");
    const std::string error = error_of([&] { world.barrier().wait(); });
    EXPECT_TRUE(error.ends_with(": rank 0 has closed its communicator after: rank 0 aborted: enough")) << error;
  });
}

TEST_P(Failure, NewWorldWorksAfterFailure) {
  for (int round = 0; round < 2; ++round) {
    run_ranks(2, [](Communicator& comm) {
      if (comm.rank() == 0) comm.abort("once more");
      EXPECT_NE(error_of([&] { all_reduce(comm, 1000); }), "");
    });
    run_ranks(2, [](Communicator& comm) { EXPECT_EQ(error_of([&] { all_reduce(comm, 1000); }), ""); });
  }
}

/// An operation without data completes when the signature of the last rank arrives, perhaps during its submission.
TEST_P(Failure, EmptyCallsAreCompared) {
  run_ranks(3, [](Communicator& comm) {
    for (int i = 0; i < 300; ++i) EXPECT_EQ(error_of([&] { all_reduce(comm, 0); }), "");
    const std::string error = error_of([&] { comm.rank() == 0 ? comm.barrier().wait() : all_reduce(comm, 0); });
    EXPECT_TRUE(error.starts_with("Mismatch: ")) << error;
  });
}

INSTANTIATE_TEST_SUITE_P(Over, Failure, testing::Values("shm", "tcp"),
                         [](const auto& given) { return std::string(given.param); });

/// Only the two ranks can answer each other, and both wait for answers at the same time.
TEST(Deadlines, TwoTimeoutsDoNotReportEachOtherAsDead) {
  InitOptions config = quick_config();
  config.progress_thread = false;
  run_threads(2, config, [](Communicator& comm) {
    float x = 0;
    comm.barrier().wait();
    const std::string error = error_of([&] { comm.recv(view_of(&x, 1), 1 - comm.rank(), {.timeout = 300ms}).wait(); });
    EXPECT_TRUE(error.starts_with("Timeout: ")) << error;
    EXPECT_EQ(error.find("not responding"), std::string::npos) << error;
  });
}

/// A reader of a small broadcast waits for the root alone, so the error names no other rank.
TEST(Deadlines, BroadcastTimeoutNamesRoot) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<float> x(10);
    if (comm.rank() != 1) {  // until the failure arrives
      EXPECT_NE(error_of([&] { comm.recv(view_of(x.data(), 1), 1).wait(); }), "");
      return;
    }
    const View view = view_of(x.data(), x.size());
    const std::string error = error_of([&] { comm.broadcast(view, view, 0, {.timeout = 200ms}).wait(); });
    EXPECT_TRUE(error.starts_with("Timeout: ")) << error;
    EXPECT_NE(error.find("rank 0 is behind at operation #0"), std::string::npos) << error;
    EXPECT_EQ(error.find("rank 2"), std::string::npos) << error;
  });
}

/// Without checked mode, different lengths are still detected on arrival.
TEST(Unchecked, OtherLengthIsMismatch) {
  for (const char* backend : {"shm", "tcp"}) {
    InitOptions config;
    config.backend = backend;
    config.timeout = 20s;
    run_threads(2, config, [&](Communicator& comm) {
      const std::string error = error_of([&] {
        all_reduce(comm, comm.rank() == 0 ? 10 : 12);
        comm.barrier().wait();
      });
      EXPECT_TRUE(error.starts_with("Mismatch: ")) << backend << ": " << error;
    });
  }
}

/// The root of a small broadcast waits for no rank: the reader detects the mismatch, lists the call of each rank, and
/// fails the root.
TEST(Unchecked, OtherBroadcastIsMismatchOnAllRanks) {
  run_ranks(3, [](Communicator& comm) {
    std::vector<float> x(12);
    const std::size_t count = comm.rank() == 1 ? 12 : 10;
    const std::string error = error_of([&] {
      comm.broadcast(view_of(x.data(), count), view_of(x.data(), count), 0).wait();
      comm.barrier().wait();
    });
    EXPECT_EQ(error,
              "Mismatch: operation #1 differs between the ranks: rank 0: broadcast of 10 f32 root 0; rank 1: broadcast "
              "of 12 f32 root 0; rank 2: broadcast of 10 f32 root 0");
  });
}

/// A message concerns two ranks: they alone can detect that it is too short or too long.
TEST(Unchecked, ShorterOrLongerMessageIsMismatch) {
  for (const char* backend : {"shm", "tcp"})
    for (const std::size_t count : {9u, 11u}) {
      InitOptions config;
      config.backend = backend;
      config.timeout = 20s;
      run_threads(2, config, [&](Communicator& comm) {
        std::vector<float> x(20, 1);
        const std::string error = error_of([&] {
          if (comm.rank() == 0) comm.send(view_of(x.data(), count), 1).wait();
          if (comm.rank() == 1) comm.recv(view_of(x.data(), 10), 0).wait();
          comm.barrier().wait();
        });
        EXPECT_TRUE(error.starts_with("Mismatch: ")) << backend << ", " << count << ": " << error;
      });
    }
}

/// A late peer may still read them.
TEST(FailedWindows, AreNotReused) {
  run_ranks(2, [](Communicator& comm) {
    const auto child = comm.split(0, comm.rank());
    const auto allocate = [&] { return comm.allocate(std::size_t{1} << 20, MemoryKind::host, MemoryCategory::other); };
    allocate().reset();  // from here on one window is idle
    Buffer buffer = allocate();
    const void* const before = buffer.data();
    buffer.reset();
    buffer = allocate();
    EXPECT_EQ(buffer.data(), before) << "the control: nothing has failed";
    if (comm.rank() == 0) child->abort("on purpose");
    EXPECT_NE(error_of([&] { child->barrier().wait(); }), "");
    buffer.reset();
    EXPECT_NE(allocate().data(), before);
  });
}

}  // namespace
}  // namespace tessera::comm_test
