// The operations that the conformance suite does not cover, traffic, split and allocate.
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <numeric>
#include <thread>

#include "tests/comm/mixed_memory.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

TEST(Communicator, SupportsPartsOfDifferentLengths) {
  for (const std::size_t scale : {1u, 40'000u})
    run_ranks(4, [&](Communicator& comm) {
      const auto n = static_cast<std::size_t>(comm.size());
      const auto me = static_cast<std::size_t>(comm.rank());
      const std::vector<std::size_t> counts = {3 * scale, 0, 1 * scale, 5 * scale};
      const std::size_t total = 9 * scale;
      std::vector<std::int32_t> own(counts[me], static_cast<std::int32_t>(me));
      std::vector<std::int32_t> all(total, -1);
      std::vector<std::int32_t> expected;
      for (std::size_t r = 0; r < n; ++r) expected.insert(expected.end(), counts[r], static_cast<std::int32_t>(r));
      comm.all_gather_v(view_of(own.data(), own.size()), view_of(all.data(), total), counts).wait();
      EXPECT_EQ(all, expected);
      std::fill(all.begin(), all.end(), -1);
      comm.gather_v(view_of(own.data(), own.size()), view_of(all.data(), total), counts, 2).wait();
      EXPECT_EQ(all == expected, me == 2);
      std::vector<std::int32_t> part(counts[me], -1);
      comm.scatter_v(view_of(expected.data(), total), view_of(part.data(), part.size()), counts, 1).wait();
      EXPECT_EQ(part, own);
      std::fill(part.begin(), part.end(), -1);
      comm.reduce_scatter_v(view_of(expected.data(), total), view_of(part.data(), part.size()), counts, ReduceOp::sum())
          .wait();
      for (const std::int32_t x : part) ASSERT_EQ(x, static_cast<std::int32_t>(4 * me));
      // Rank a sends (a + 2b + 1) % 4 * scale elements with value 10a + b to rank b.
      std::vector<std::size_t> out_counts(n);
      std::vector<std::size_t> in_counts(n);
      std::vector<std::int32_t> input;
      std::vector<std::int32_t> want;
      for (std::size_t r = 0; r < n; ++r) {
        in_counts[r] = (me + 2 * r + 1) % 4 * scale;
        out_counts[r] = (r + 2 * me + 1) % 4 * scale;
        input.insert(input.end(), in_counts[r], static_cast<std::int32_t>(10 * me + r));
        want.insert(want.end(), out_counts[r], static_cast<std::int32_t>(10 * r + me));
      }
      for (const bool window : {false, true}) {
        Buffer buffer = comm.allocate(input.size() * 4, MemoryKind::host, MemoryCategory::other);
        std::copy(input.begin(), input.end(), static_cast<std::int32_t*>(buffer.data()));
        const std::int32_t* from = window ? static_cast<std::int32_t*>(buffer.data()) : input.data();
        std::vector<std::int32_t> got(want.size(), -1);
        comm.all_to_all_v(view_of(from, input.size()), in_counts, view_of(got.data(), got.size()), out_counts).wait();
        EXPECT_EQ(got, want);
      }
    });
}

/// A communicator of one rank, for f32 and bytes only.
class F32Communicator final : public Communicator {
 public:
  F32Communicator() : Communicator(0, 1, {}) {
    capabilities_ = {.backend = "narrow", .dtypes = {DType::f32, DType::u8}, .memory = {MemoryKind::host}};
  }
  const Capabilities& capabilities() const noexcept override { return capabilities_; }
  int started = 0;

 private:
  Work do_start(const OpDesc&) override { return ++started, Work(); }
  Work do_batch(std::span<const OpDesc>) override { return {}; }
  std::unique_ptr<Communicator> do_split(int, int, const SplitOptions&) override { return nullptr; }
  Buffer do_allocate(std::size_t, MemoryKind, std::optional<MemoryCategory>) override { return {}; }
  void do_abort(std::string_view) noexcept override {}
  void do_traffic(TrafficStats&) const override {}
  Capabilities capabilities_;
};

TEST(Communicator, RejectsUnsupportedDtypes) {
  F32Communicator comm;
  std::vector<float> numbers(2);
  std::vector<double> doubles(2);
  const View taken = view_of(numbers.data(), 2), other = view_of(doubles.data(), 2);
  comm.all_reduce(taken, taken, ReduceOp::sum()).wait();
  comm.barrier().wait();
  EXPECT_EQ(comm.started, 2);
  try {
    comm.all_gather(other, other);
    FAIL() << "it was started";
  } catch (const base::Unsupported& error) {
    EXPECT_STREQ(error.what(), "all_gather: backend narrow does not support f64; supported: f32 u8");
  }
  EXPECT_EQ(comm.started, 2);
}

TEST(Communicator, MessagesKeepOrderAndBatchesDoNotBlock) {
  run_ranks(3, [](Communicator& comm) {
    const int right = (comm.rank() + 1) % comm.size();
    const int left = (comm.rank() + comm.size() - 1) % comm.size();
    for (const std::size_t count : {0u, 1u, 1000u, 200'000u})
      for (const bool window : {false, true}) {
        Buffer buffer = comm.allocate(2 * count * 4, MemoryKind::host, MemoryCategory::other);
        std::vector<std::int32_t> ordinary(2 * count);
        std::int32_t* input = window ? static_cast<std::int32_t*>(buffer.data()) : ordinary.data();
        std::vector<std::int32_t> got(2 * count, -1);
        std::fill_n(input, count, comm.rank());
        std::fill_n(input + count, count, 100 + comm.rank());
        // All ranks send first: with blocking sends this would deadlock.
        Work first = comm.send(view_of(input, count), right);
        Work second = comm.send(view_of(input + count, count), right);
        comm.recv(view_of(got.data(), count), left).wait();
        comm.recv(view_of(got.data() + count, count), left).wait();
        first.wait();
        second.wait();
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(got[i], left);
          ASSERT_EQ(got[count + i], 100 + left);
        }
        const P2POp parts[] = {P2POp::send(view_of(input, count), left), P2POp::send(view_of(input, count), right),
                               P2POp::recv(view_of(got.data(), count), left),
                               P2POp::recv(view_of(got.data() + count, count), right)};
        comm.batch(parts).wait();
        for (std::size_t i = 0; i < count; ++i) {
          ASSERT_EQ(got[i], left);
          ASSERT_EQ(got[count + i], right);
        }
      }
  });
}

TEST(Communicator, SplitOrdersByKeyThenRankAndInheritsMemory) {
  run_ranks(5, [](Communicator& world) {
    Buffer buffer = world.allocate(1 << 20, MemoryKind::host, MemoryCategory::parameter);
    EXPECT_EQ(world.memory_tracker()->snapshot().now_of(MemoryCategory::parameter), 1u << 20);
    const int color = world.rank() == 4 ? -1 : world.rank() % 2;
    const auto half = world.split(color, -world.rank());
    if (world.rank() == 4) {
      EXPECT_EQ(half, nullptr);
      return;
    }
    ASSERT_EQ(half->size(), 2);
    EXPECT_EQ(half->rank(), world.rank() < 2 ? 1 : 0);  // the higher rank has the lower key
    const auto single = half->split(half->rank(), 0);
    EXPECT_EQ(single->size(), 1);
    float* data = reinterpret_cast<float*>(buffer.bytes_at(4096 * static_cast<std::size_t>(world.rank())));
    std::fill_n(data, 100'000, static_cast<float>(world.rank()));
    half->all_reduce(view_of(data, 100'000), view_of(data, 100'000), ReduceOp::sum()).wait();
    for (int i = 0; i < 100'000; ++i) ASSERT_EQ(data[i], world.rank() % 2 == 0 ? 2 : 4);
    const std::uint64_t staging = world.memory_tracker()->snapshot().now_of(MemoryCategory::communication);
    std::vector<float> ordinary(100'000, 1);
    half->all_reduce(view_of(ordinary.data(), ordinary.size()), view_of(ordinary.data(), ordinary.size()),
                     ReduceOp::sum())
        .wait();
    EXPECT_GT(world.memory_tracker()->snapshot().now_of(MemoryCategory::communication),
              staging);  // the window needs none
  });
}

TEST(Communicator, AcceptsHostMemoryAndWindows) {
  for (const int ranks : {2, 3, 5}) run_ranks(ranks, [](Communicator& comm) { move_mixed_memory(comm, 5, 60); });
}

/// A root may be far ahead: its payloads remain until all ranks have read them.
TEST(Communicator, EarlyRootOverwritesNothing) {
  run_ranks(3, [](Communicator& comm) {
    for (int step = 0; step < 300; ++step) {
      std::vector<float> x(500, comm.rank() == 1 ? static_cast<float>(step) : -1.0f);
      if (comm.rank() == 2 && step % 50 == 49) std::this_thread::sleep_for(2ms);  // not for ordering: to be late
      comm.broadcast(view_of(x.data(), x.size()), view_of(x.data(), x.size()), 1).wait();
      for (const float value : x) ASSERT_EQ(value, static_cast<float>(step));
    }
  });
}

/// A root completes before the other ranks have read: its payload remains, although it closes the communicator and
/// creates others.
TEST(Communicator, EarlyExitOfRootLosesNoData) {
  std::atomic<bool> gone{false};
  run_ranks(3, [&](Communicator& world) {
    const auto pair = world.split(world.rank() == 1 ? -1 : 0, 0);
    auto all = world.split(0, world.rank());
    std::vector<float> x(500, world.rank() == 0 ? 7.0f : 0.0f);
    const View view = view_of(x.data(), x.size());
    if (world.rank() == 1)
      while (!gone.load()) std::this_thread::yield();
    all->broadcast(view, view, 0).wait();
    EXPECT_EQ(x, std::vector<float>(500, 7.0f));
    all.reset();
    if (pair == nullptr) return;
    std::vector<std::unique_ptr<Communicator>> others;  // enough to need every free piece of memory
    for (int i = 0; i < 20; ++i) {
      others.push_back(pair->split(0, pair->rank()));
      others.back()->broadcast(view, view, 0).wait();
    }
    if (world.rank() == 0) gone.store(true);
  });
}

/// The scratch memory that a large operation needs between its steps is freed.
TEST(Communicator, ReleasesLargeScratch) {
  InitOptions config = quick_config();
  config.backend = "tcp";
  run_threads(4, config, [](Communicator& comm) {
    std::vector<float> x(4 << 20, 1);
    const std::uint64_t before = comm.memory_tracker()->snapshot().now_of(MemoryCategory::communication);
    comm.all_reduce(view_of(x.data(), x.size()), view_of(x.data(), x.size()), ReduceOp::sum()).wait();
    comm.barrier().wait();  // an operation is freed after it reports completion
    const auto after = comm.memory_tracker()->snapshot();
    EXPECT_GT(after.peak_of(MemoryCategory::communication), before + (1U << 20)) << "the control: it needed much";
    EXPECT_LE(after.now_of(MemoryCategory::communication), before + (1U << 20));
  });
}

/// What a communicator of shared memory held is used again once all members have destroyed it.
TEST(Communicator, SplitsLeaveNoMemory) {
  run_ranks(3, [](Communicator& comm) {
    const auto held_after = [&](int splits) {
      for (int i = 0; i < splits; ++i) comm.split(0, comm.rank())->barrier().wait();
      comm.barrier().wait();
      return comm.memory_tracker()->snapshot().now_of(MemoryCategory::communication);
    };
    const std::uint64_t few = held_after(20);
    const auto living = comm.split(0, comm.rank());
    EXPECT_GE(held_after(0), few);  // the control: one that lives holds some
    EXPECT_LT(held_after(400), few + (512U << 10));
  });
}

/// Checked mode keeps the signatures of an operation only until the ranks agree.
TEST(Communicator, CheckedModeMemoryIsBounded) {
  InitOptions config = quick_config();
  config.backend = "tcp";
  config.check = true;
  static std::size_t used[2];
  run_threads(2, config, [](Communicator& comm) {
    const auto barriers = [&](int count) {
      for (int i = 0; i < count; ++i) comm.barrier().wait();
    };
    barriers(500);
    if (comm.rank() == 0) used[0] = ::mallinfo2().uordblks;
    barriers(5000);
    if (comm.rank() == 0) used[1] = ::mallinfo2().uordblks;
    comm.barrier().wait();
  });
  EXPECT_LT(used[1], used[0] + 200'000);
}

/// Windows grow past the freed ones, whose pages are dropped while the library searches for a place for the new one. A
/// broken list of free places causes overlapping windows, which the sanitizers detect at once.
TEST(Communicator, GrowingWindowsNeverOverlapLiveOnes) {
  run_ranks(2, [](Communicator& comm) {
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    std::vector<Buffer> living;
    for (std::size_t round = 1; round <= 4; ++round) {
      {
        const Buffer reused = comm.allocate(12 * round * kMiB, MemoryKind::host, MemoryCategory::other);
        std::memset(reused.data(), 0x55, reused.bytes());
      }
      living.push_back(comm.allocate((12 * round + 4) * kMiB, MemoryKind::host, MemoryCategory::other));
      std::memset(living.back().data(), static_cast<int>(round), living.back().bytes());
      living.push_back(comm.allocate(1000, MemoryKind::host, MemoryCategory::other));
      std::memset(living.back().data(), static_cast<int>(round), living.back().bytes());
    }
    for (std::size_t i = 0; i < living.size(); ++i) {
      const auto* bytes = static_cast<const unsigned char*>(living[i].data());
      const auto mine = [&](unsigned char byte) { return byte == i / 2 + 1; };
      EXPECT_TRUE(std::all_of(bytes, bytes + living[i].bytes(), mine)) << "window " << i;
    }
  });
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t all = 0, resident = 0;
  file >> all >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// Idle windows return to the system when an allocation needs another size.
TEST(Communicator, ReleasesIdleWindows) {
  run_ranks(1, [](Communicator& comm) {
    constexpr std::size_t kMiB = std::size_t{1} << 20;
    const std::size_t before = resident_bytes();
    for (int i = 0; i < 3; ++i) {
      std::vector<Buffer> buffers;
      for (int k = 0; k < 16; ++k) {
        buffers.push_back(comm.allocate(8 * kMiB, MemoryKind::host, MemoryCategory::other));
        std::memset(buffers.back().data(), 1, buffers.back().bytes());
      }
      EXPECT_GT(resident_bytes(), before + 120 * kMiB);
    }
    const Buffer other =
        comm.allocate(256 * kMiB, MemoryKind::host, MemoryCategory::other);  // larger than any idle window
#ifdef __SANITIZE_THREAD__
    constexpr std::size_t kRoom =
        (64 + 4 * 128) * kMiB;  // this sanitizer keeps four bytes beside each that was written
#else
    constexpr std::size_t kRoom = 64 * kMiB;
#endif
    EXPECT_LT(resident_bytes(), before + kRoom);
  });
}

TEST(Traffic, EqualsFormulas) {
  InitOptions config = quick_config();
  config.algorithms = "all_reduce=direct";
  for (const int ranks : {2, 3, 4})
    run_threads(ranks, config, [&](Communicator& comm) {
      const auto n = static_cast<std::size_t>(comm.size());
      for (const std::size_t part : {1u, 24u, 50'000u})
        for (const bool window : {false, true}) {
          const std::size_t total = part * n;
          Buffer a = comm.allocate(total * 4, MemoryKind::host, MemoryCategory::other);
          std::vector<float> ordinary(total);
          float* in = window ? static_cast<float*>(a.data()) : ordinary.data();
          std::vector<float> out(total);
          std::fill_n(in, total, 1.0f);
          const auto measured = [&](OpKind kind, const std::function<Work()>& call, int root = 0) {
            const TrafficStats before = comm.traffic();
            call().wait();
            const TrafficStats done = comm.traffic() - before;
            EXPECT_EQ(done.of(kind).calls, 1u);
            EXPECT_EQ(done.of(kind).bytes_sent, direct_bytes_sent(kind, total, 4, comm.size(), comm.rank(), root))
                << name_of(kind);
            EXPECT_EQ(std::accumulate(done.bytes_to_peer.begin(), done.bytes_to_peer.end(), std::uint64_t{0}),
                      done.bytes_sent());
          };
          const auto all = [&](float* x) { return view_of(x, total); };
          const auto one = [&](float* x) { return view_of(x, part); };
          measured(OpKind::all_reduce, [&] { return comm.all_reduce(all(in), all(out.data()), ReduceOp::sum()); });
          measured(OpKind::reduce_scatter,
                   [&] { return comm.reduce_scatter(all(in), one(out.data()), ReduceOp::sum()); });
          measured(OpKind::all_gather, [&] { return comm.all_gather(one(in), all(out.data())); });
          measured(OpKind::all_to_all, [&] { return comm.all_to_all(all(in), all(out.data())); });
          measured(
              OpKind::broadcast, [&] { return comm.broadcast(all(in), all(out.data()), 1); }, 1);
          measured(
              OpKind::reduce, [&] { return comm.reduce(all(in), all(out.data()), ReduceOp::sum(), 1); }, 1);
          measured(
              OpKind::gather, [&] { return comm.gather(one(in), all(out.data()), 1); }, 1);
          measured(
              OpKind::scatter, [&] { return comm.scatter(all(in), one(out.data()), 1); }, 1);
        }
    });
}

TEST(Traffic, ExcludesSplit) {
  run_ranks(3, [](Communicator& comm) {
    const TrafficStats before = comm.traffic();
    const auto part = comm.split(0, comm.rank());
    const TrafficStats change = comm.traffic() - before;
    EXPECT_EQ(change.bytes_sent(), 0U);
    EXPECT_EQ(change.calls(), 0U);
  });
}

/// The bytes that backends count if their library can't report what it sent.
TEST(Traffic, FormulasPerPeerAddUp) {
  constexpr int kRanks = 5;
  constexpr OpKind kKinds[] = {OpKind::all_reduce, OpKind::all_gather, OpKind::reduce_scatter, OpKind::broadcast,
                               OpKind::all_to_all, OpKind::reduce,     OpKind::gather,         OpKind::scatter};
  for (const OpKind kind : kKinds)
    for (int root = 0; root < kRanks; ++root)
      for (int rank = 0; rank < kRanks; ++rank) {
        std::uint64_t sum = 0;
        for (int peer = 0; peer < kRanks; ++peer) {
          const Route route{.ranks = kRanks, .rank = rank, .peer = peer, .root = root};
          if (peer != rank) sum += direct_bytes_to(kind, 60, 4, route);
        }
        EXPECT_EQ(sum, direct_bytes_sent(kind, 60, 4, kRanks, rank, root)) << name_of(kind) << " " << root << rank;
      }
}

/// Negative control: traffic counts detect an algorithm that moves more data.
TEST(Traffic, CountsMoreBytesOfSymmetricAlgorithm) {
  InitOptions config = quick_config();
  config.algorithms = "all_reduce=symmetric:0-1K";
  run_threads(4, config, [](Communicator& comm) {
    std::vector<float> x(100, 1);
    const TrafficStats before = comm.traffic();
    comm.all_reduce(view_of(x.data(), 100), view_of(x.data(), 100), ReduceOp::sum()).wait();
    const std::uint64_t sent = (comm.traffic() - before).of(OpKind::all_reduce).bytes_sent;
    EXPECT_EQ(sent, 3u * 400);
    EXPECT_GT(sent, direct_bytes_sent(OpKind::all_reduce, 100, 4, 4, comm.rank()));
  });
}

}  // namespace
}  // namespace tessera::comm_test
