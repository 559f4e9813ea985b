// Injected faults: each does what it says, and the checks that should report it do.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <thread>

#include "tests/comm/decorators_support.h"
#include "tests/conformance/reference.h"

namespace tessera::comm_test {
namespace {

/// Ranks and elements at which an all_reduce of the conformance inputs differs from the reference.
std::vector<std::string> differences(const InitOptions& config, DType dtype, std::size_t count) {
  Lines wrong;
  run_threads(3, config, [&](Communicator& comm) {
    std::vector<conformance::Bytes> inputs;
    for (int r = 0; r < 3; ++r) inputs.push_back(conformance::make_input(dtype, 7, r, count));
    const conformance::Bytes want = conformance::reduce(dtype, ReduceOp::sum(), inputs);
    conformance::Bytes x = inputs[static_cast<std::size_t>(comm.rank())];
    comm.barrier().wait();
    comm.all_reduce({x.data(), count, dtype, {}}, {x.data(), count, dtype, {}}, ReduceOp::sum()).wait();
    const auto at = conformance::first_difference(dtype, x.data(), want.data(), count);
    if (at >= 0) wrong.add(std::to_string(comm.rank()) + ":" + std::to_string(at));
  });
  return wrong.get();
}

TEST(Fault, CorruptedBitChangesResult) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::i64}) {
    EXPECT_EQ(differences(quick_config(), dtype, 1000), std::vector<std::string>{});
    EXPECT_EQ(differences(with_fault({FaultKind::corrupt, 2, 1}), dtype, 1000), std::vector<std::string>{"1:500"});
    EXPECT_EQ(differences(with_fault({FaultKind::corrupt, 3, 1}), dtype, 1000),
              std::vector<std::string>{});  // never issued
  }
}

TEST(Fault, CorruptsInputOfOperationsWithoutResult) {
  run_threads(2, with_fault({FaultKind::corrupt, 1, 0}), [](Communicator& comm) {
    std::vector<std::int32_t> x{4, 4, 4};
    const auto view = view_of(x.data(), 3);
    if (comm.rank() == 0) comm.send(view, 1).wait();
    if (comm.rank() == 0) {
      EXPECT_EQ(x, (std::vector<std::int32_t>{4, 4, 4}));  // the caller's memory is unchanged
    }
    if (comm.rank() == 1) comm.recv(view, 0).wait();
    if (comm.rank() == 1) {
      EXPECT_EQ(x, (std::vector<std::int32_t>{4, 5, 4}));
    }
  });
  // What the stream has still to write is what is sent, but for one bit.
  run_threads(2, with_fault({FaultKind::corrupt, 1, 0}), [](Communicator& comm) {
    std::vector<std::int32_t> x(3, 0);
    const auto view = view_of(x.data(), 3);
    if (comm.rank() == 1) {
      comm.recv(view, 0).wait();
      EXPECT_EQ(x, (std::vector<std::int32_t>{4, 5, 4}));
      return;
    }
    const auto stream = make_lazy_stream();
    stream->run([&] { std::fill(x.begin(), x.end(), 4); });
    comm.send(view, 1, {.after = stream.get()}).wait();
  });
  run_threads(2, with_fault({FaultKind::corrupt, 1}), [](Communicator& comm) {
    EXPECT_EQ(error_of([&] { comm.barrier(); }),
              "InvalidUsage: fault: corrupt at barrier #1: it has no elements on this rank");
  });
}

TEST(Fault, DroppedCallIsTimeoutThatNamesRank) {
  run_threads(3, with_fault({FaultKind::drop, 2, 1}), [](Communicator& comm) {
    comm.barrier().wait();
    const std::string error = error_of([&] { summed(comm, 10, {.timeout = 300ms, .label = "block.3"}); });
    EXPECT_EQ(error, comm.rank() == 1
                         ? "Timeout: all_reduce #2 (block.3): this rank dropped it (an injected fault)"
                         : "Timeout: all_reduce #2 (block.3): not done within 300ms; rank 1 is behind at operation #1");
    if (comm.rank() == 1) std::this_thread::sleep_for(1s);  // must still reply when others query which rank is behind
  });
}

TEST(Fault, AbortEndsWaitForDroppedCall) {
  run_threads(1, with_fault({FaultKind::drop, 1}), [](Communicator& comm) {
    Work work = comm.barrier();
    EXPECT_FALSE(work.wait_for(1ms));
    std::thread other([&] { comm.abort("enough"); });
    EXPECT_EQ(error_of([&] { work.wait(); }), "Aborted: barrier #1: rank 0 aborted: enough");
    other.join();
  });
}

/// A rank of a world of two processes; exits with 0 if it received the report of the peer's death.
[[noreturn]] void rank_of_two(int rank, const std::string& job) {
  int code = 1;
  try {
    InitOptions config = with_fault({FaultKind::kill, 3, 1});
    config.launch =
        Launch{.launcher = "test", .rank = rank, .size = 2, .local_rank = rank, .local_size = 2, .job = job};
    const auto comm = init(config);
    const std::string error = error_of([&] {
      for (int i = 0; i < 10; ++i) summed(*comm, 100);
    });
    const bool named = error.starts_with("PeerLost: all_reduce #3") && error.find("rank 1") != std::string::npos;
    if (!named) std::fprintf(stderr, "rank %d saw: %s\n", rank, error.c_str());
    code = named ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
  }
  ::_exit(code);
}

TEST(Fault, KillsOwnProcessAtCall) {
  const std::string job = "fault-" + std::to_string(::getpid());
  pid_t ranks[2];
  for (const int rank : {0, 1}) {
    ranks[rank] = ::fork();
    if (ranks[rank] == 0) rank_of_two(rank, job);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(ranks[1], &status, 0), ranks[1]);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
  ASSERT_EQ(::waitpid(ranks[0], &status, 0), ranks[0]);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

}  // namespace
}  // namespace tessera::comm_test
