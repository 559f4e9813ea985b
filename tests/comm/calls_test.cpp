// Options of single calls: timeouts, streams (`after`) and parts of _v operations; and the resources that a world keeps
// over many calls.
#include <gtest/gtest.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <barrier>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

InitOptions config_of(const std::string& backend) {
  InitOptions config = quick_config();
  config.backend = backend;
  return config;
}

class Calls : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Over, Calls, testing::Values("shm", "tcp"),
                         [](const auto& given) { return std::string(given.param); });

/// The world's timeout is a minute.
TEST_P(Calls, HaveTheirOwnDeadlinesInBatches) {
  for (const bool batch : {false, true})
    run_threads(3, config_of(GetParam()), [&](Communicator& comm) {
      if (comm.rank() > 0) {  // until the failure of rank 0 arrives
        EXPECT_NE(error_of([&] { comm.barrier().wait(); }), "");
        return;
      }
      std::vector<float> x(10);
      const auto start = std::chrono::steady_clock::now();
      const OpOptions options{.timeout = 200ms, .label = "mine"};
      const std::string error = error_of([&] {
        if (!batch) return comm.recv(view_of(x.data(), x.size()), 1, options).wait();
        const P2POp parts[] = {P2POp::recv(view_of(x.data(), x.size()), 1)};
        comm.batch(parts, options).wait();
      });
      EXPECT_NE(error.find("not done within 200ms"), std::string::npos) << error;
      EXPECT_NE(error.find("(mine)"), std::string::npos) << error;
      EXPECT_NE(error.find("rank 1"), std::string::npos) << error;
      EXPECT_EQ(error.find("rank 2"), std::string::npos) << error << ": it has no part in a message of two others";
      EXPECT_LT(std::chrono::steady_clock::now() - start, 20s);
    });
}

TEST_P(Calls, BatchWaitsForStream) {
  for (const bool after : {true, false})
    run_threads(2, config_of(GetParam()), [&](Communicator& comm) {
      const std::unique_ptr<Stream> stream = make_lazy_stream();
      std::vector<float> x(1000, 1), y(1000, 0);
      stream->run([&] { std::fill(x.begin(), x.end(), 2.0F); });
      const int peer = 1 - comm.rank();
      const P2POp parts[] = {P2POp::send(view_of(x.data(), x.size()), peer),
                             P2POp::recv(view_of(y.data(), y.size()), peer)};
      const TrafficStats before = comm.traffic();
      comm.batch(parts, {.after = after ? stream.get() : nullptr}).wait();
      const TrafficStats change = comm.traffic() - before;
      EXPECT_EQ(change.of(OpKind::send).calls, 1U);
      EXPECT_EQ(change.of(OpKind::recv).calls, 1U);
      // Control: without `after` the values before the stream's work are sent.
      EXPECT_EQ(y, std::vector<float>(1000, after ? 2.0F : 1.0F));
      stream->synchronize();
    });
}

TEST_P(Calls, TrafficCountsByPeerSinceSnapshot) {
  run_threads(3, config_of(GetParam()), [](Communicator& comm) {
    std::vector<float> x(300, 1), y(300);
    const auto all_to_all = [&] { comm.all_to_all(view_of(x.data(), 300), view_of(y.data(), 300)).wait(); };
    all_to_all();
    comm.barrier().wait();
    const TrafficStats before = comm.traffic();
    all_to_all();
    comm.barrier().wait();
    const TrafficStats change = comm.traffic() - before;
    for (int r = 0; r < 3; ++r)
      EXPECT_EQ(change.bytes_to_peer[static_cast<std::size_t>(r)], r == comm.rank() ? 0U : 400U) << r;
    EXPECT_EQ(change.calls(), 2U);
  });
}

TEST_P(Calls, RejectTimeoutsThatEndAtOnce) {
  run_threads(2, config_of(GetParam()), [](Communicator& comm) {
    for (const auto timeout : {0ms, -5ms}) {
      const std::string why = ": timeout is " + std::to_string(timeout.count()) +
                              " ms, needs 1 ms or more; leave it out for the communicator's own";
      EXPECT_EQ(error_of([&] { comm.barrier({.timeout = timeout}); }), "InvalidUsage: barrier" + why);
      EXPECT_EQ(error_of([&] {
                  comm.create_group(std::array{0, 1}, {.timeout = timeout});
                }),
                "InvalidUsage: create_group" + why);
    }
    comm.barrier({.timeout = 20s}).wait();  // nothing was sent
  });
  InitOptions never = config_of(GetParam());
  never.timeout = 0ms;
  EXPECT_THROW(run_threads(2, never, [](Communicator&) {}), InvalidUsage);
}

TEST_P(Calls, RejectOverlappingPartsAtRoot) {
  run_threads(2, config_of(GetParam()), [](Communicator& comm) {
    std::vector<float> x(30, 1);
    const std::vector<std::size_t> counts = {10, 20};
    const bool root = comm.rank() == 0;
    if (root) {
      const std::string scatter =
          error_of([&] { comm.scatter_v(view_of(x.data(), 30), view_of(x.data() + 5, 10), counts, 0).wait(); });
      EXPECT_NE(scatter.find("in and out overlap"), std::string::npos) << scatter;
      const std::string gather =
          error_of([&] { comm.gather_v(view_of(x.data() + 5, 10), view_of(x.data(), 30), counts, 0).wait(); });
      EXPECT_NE(gather.find("in and out overlap"), std::string::npos) << gather;
    }
    // Control: the root's part in its own place is accepted.
    std::vector<float> part(20);
    const View own = root ? view_of(x.data(), 10) : view_of(part.data(), 20);
    comm.scatter_v(view_of(x.data(), root ? 30 : 0), own, counts, 0).wait();
    // The amount that a rank sends to itself must equal the amount that it receives from itself.
    for (const bool sends_more : {true, false}) {
      const std::string different = error_of([&] {
        const std::vector<std::size_t> given = {5, 10}, less = {4, 11}, more = {6, 9};
        std::vector<float> in(15), out(15);
        comm.all_to_all_v(view_of(in.data(), 15), given, view_of(out.data(), 15), root == sends_more ? less : more)
            .wait();
      });
      EXPECT_NE(different.find("out_counts of the same rank is"), std::string::npos) << different;
    }
  });
}

TEST_P(Calls, RejectMessagesToSelf) {
  run_threads(2, config_of(GetParam()), [](Communicator& comm) {
    float x = 1;
    EXPECT_NE(error_of([&] { comm.send(view_of(&x, 1), comm.rank()).wait(); }).find("needs another rank"),
              std::string::npos);
  });
}

/// Calls arrive for a communicator that their receiver has not created yet.
TEST(Splits, AreUsableAtOnceInCheckedMode) {
  InitOptions config = config_of("tcp");
  config.check = true;
  run_threads(4, config, [](Communicator& comm) {
    for (int i = 0; i < 200; ++i) {
      const auto part = comm.split(0, comm.rank());
      part->barrier().wait();
    }
  });
}

/// Creates more communicators, one after the other, than may exist at a time.
TEST(Splits, ReleaseTheirIds) {
  run_threads(2, config_of("tcp"), [](Communicator& comm) {
    for (int i = 0; i < 4200; ++i) EXPECT_EQ(comm.split(0, comm.rank())->size(), 2);
  });
}

/// A message that waits in its receiver's memory is counted there until it is received.
TEST(Messages, MemoryOfThoseThatCameEarlyIsTracked) {
  run_threads(2, config_of("shm"), [](Communicator& comm) {
    std::vector<float> x(100'000);
    const View all = view_of(x.data(), x.size());
    const View one = view_of(x.data(), 1);
    if (comm.rank() == 0) {
      Work early = comm.send(all, 1, {.tag = 1});
      comm.send(one, 1, {.tag = 2}).wait();
      return early.wait();
    }
    const auto live = [&] { return comm.memory_tracker()->snapshot().now_of(MemoryCategory::communication); };
    const std::uint64_t before = live();
    comm.recv(one, 0, {.tag = 2}).wait();
    EXPECT_EQ(live(), before + all.bytes());
    comm.recv(all, 0, {.tag = 1}).wait();
    EXPECT_EQ(live(), before);
  });
}

/// If ranks of one host use shared memory and all others sockets, one failure ends both.
TEST(Composite, AbortReachesSharedMemoryOperations) {
  std::barrier connected(2);  // not one of the communicator's, which rank 1 may still be in when rank 0 aborts
  run_threads(2, config_of("shm+tcp"), [&](Communicator& comm) {
    comm.barrier().wait();
    connected.arrive_and_wait();
    if (comm.rank() == 0) {
      comm.abort("on purpose");
      EXPECT_NE(error_of([&] { comm.barrier().wait(); }), "");
      return;
    }
    const auto start = std::chrono::steady_clock::now();
    const std::string error = error_of([&] { comm.barrier({.timeout = 10s}).wait(); });
    EXPECT_NE(error.find("on purpose"), std::string::npos) << error;
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  });
}

/// A decorator or a composite names what the communicator below it ran, not the first of the table.
TEST(Composite, NamesAlgorithmThatRan) {
  struct Plain final : Communicator {
    explicit Plain(std::unique_ptr<Communicator> inner)
        : Communicator(inner->rank(), inner->size(), {}), inner_(std::move(inner)) {}
    const Capabilities& capabilities() const noexcept override { return inner_->capabilities(); }
    Work do_start(const OpDesc& call) override { return forward_to(*inner_, call); }
    Work do_batch(std::span<const OpDesc> parts) override { return forward_to(*inner_, parts); }
    std::unique_ptr<Communicator> do_split(int, int, const SplitOptions&) override { return nullptr; }
    Buffer do_allocate(std::size_t, MemoryKind, std::optional<MemoryCategory>) override { return {}; }
    void do_abort(std::string_view) noexcept override {}
    void do_traffic(TrafficStats&) const override {}
    std::unique_ptr<Communicator> inner_;
  };
  InitOptions config = config_of("tcp");
  config.decorate = [](std::unique_ptr<Communicator> world) { return std::make_unique<Plain>(std::move(world)); };
  run_threads(2, config, [&](Communicator& comm) {
    EXPECT_EQ(comm.last_algorithm(), "");
    std::vector<float> data(1 << 20);
    for (const auto& [count, name] :
         {std::pair(8, "symmetric"), std::pair(1 << 20, "direct"), std::pair(8, "symmetric")}) {
      const View view = view_of(data.data(), static_cast<std::size_t>(count));
      comm.all_reduce(view, view, ReduceOp::sum()).wait();
      EXPECT_EQ(comm.last_algorithm(), name) << count;
    }
  });
}

/// The longest duration is "no limit", not an overflow into the past.
TEST_P(Calls, TakeTheLongestDurationAsNoLimit) {
  InitOptions config = config_of(GetParam());
  config.timeout = std::chrono::milliseconds::max();
  run_threads(2, config, [](Communicator& comm) {
    float x = 1;
    for (const bool own : {false, true}) {
      if (comm.rank() == 1) std::this_thread::sleep_for(50ms);
      OpOptions options;
      if (own) options.timeout = std::chrono::milliseconds::max();
      Work work = comm.all_reduce(view_of(&x, 1), view_of(&x, 1), ReduceOp::sum(), options);
      EXPECT_TRUE(work.wait_for(std::chrono::milliseconds::max()));
    }
    EXPECT_EQ(x, 4);
    comm.split(0, 0)->barrier().wait();
    if (comm.rank() == 1) {
      std::this_thread::sleep_for(100ms);
      comm.send(view_of(&x, 1), 0).wait();
      return;
    }
    Work late = comm.recv(view_of(&x, 1), 1);
    EXPECT_FALSE(late.wait_for(1ms));  // the controls
    EXPECT_FALSE(late.wait_for(std::chrono::milliseconds::min()));
    late.wait();
  });
}

#if defined(__x86_64__)
/// Results don't depend on whether the program's thread, which flushes subnormals and rounds down, or another computes.
TEST_P(Calls, ComputeInTheDefaultEnvironment) {
  constexpr unsigned kChanged = 0x8040 | 0x2000;  // flush to zero, subnormal inputs are zeros, round down
  const unsigned before = _mm_getcsr();
  for (const std::size_t count : {std::size_t{100}, std::size_t{100'000}})
    run_threads(3, config_of(GetParam()), [&](Communicator& comm) {
      _mm_setcsr(before | kChanged);
      std::vector<std::uint32_t> bits(count);
      for (std::size_t i = 0; i < count; ++i) bits[i] = static_cast<std::uint32_t>(i % 1000 + 1);  // subnormal
      const View view{bits.data(), count, DType::f32, {}};
      comm.all_reduce(view, view, ReduceOp::sum()).wait();
      const unsigned after = _mm_getcsr();
      _mm_setcsr(before);
      for (std::size_t i = 0; i < count; ++i) ASSERT_EQ(bits[i], 3 * (i % 1000 + 1)) << i;
      EXPECT_EQ(after & kChanged, kChanged);  // the caller's stays
    });
}
#endif

TEST(Threads, MissingThreadIsTimeout) {
  const auto ranks = make_thread_bootstraps(2, 200ms);
  const std::string error = error_of([&] { ranks[0]->all_gather("here"); });
  EXPECT_EQ(error, "Timeout: init: not all ranks joined within 200ms");
}

}  // namespace
}  // namespace tessera::comm_test
