// Operations in flight: several at once, out of order, on several communicators, while ranks are outside the library.
#include <random>
#include <thread>

#include "tests/comm/support.h"

namespace tessera::comm_test {
namespace {

constexpr std::size_t kLarge = 300'000;  // elements: several tiles

struct Sum {
  explicit Sum(const Communicator& comm, std::size_t count)
      : in(count, static_cast<float>(comm.rank() + 1)), out(count) {}
  Work start(Communicator& comm) {
    return comm.all_reduce(view_of(in.data(), in.size()), view_of(out.data(), out.size()), ReduceOp::sum());
  }
  void check(const Communicator& comm) const {
    for (const float x : out) ASSERT_EQ(x, sum_of_ranks(comm.size()));
  }
  std::vector<float> in;
  std::vector<float> out;
};

TEST(Progress, CommunicatorsMayBeUsedInOppositeOrder) {
  run_ranks(2, [](Communicator& world) {
    const auto a = world.split(0, 0);
    const auto b = world.split(0, 0);
    Sum sum_a(world, kLarge);
    Sum sum_b(world, kLarge);
    Work first = world.rank() == 0 ? sum_a.start(*a) : sum_b.start(*b);
    first.wait_for(20ms);
    Work second = world.rank() == 0 ? sum_b.start(*b) : sum_a.start(*a);
    second.wait();
    first.wait();
    sum_a.check(world);
    sum_b.check(world);
  });
}

TEST(Progress, OperationsMayBeAwaitedOutOfOrder) {
  run_ranks(3, [](Communicator& world) {
    std::vector<Sum> sums;
    std::vector<Work> works;
    for (std::size_t i = 0; i < 8; ++i) sums.emplace_back(world, i % 2 == 0 ? kLarge : 5);
    for (Sum& sum : sums) works.push_back(sum.start(world));
    for (std::size_t i = works.size(); i-- > 0;) {
      works[i].wait();
      sums[i].check(world);
    }
  });
}

/// Without a progress thread the waiting thread calls back, but not for another operation's call.
TEST(Progress, CallsBackWhileWaitingIfThereIsNoProgressThread) {
  InitOptions config = quick_config();
  config.progress_thread = false;
  run_threads(2, config, [](Communicator& world) {
    Sum first(world, kLarge);
    Sum second(world, 5);
    std::thread::id called_by;
    Work work = first.start(world);
    work.on_done([&](const std::exception_ptr&) { called_by = std::this_thread::get_id(); });
    second.start(world).wait();
    work.wait();
    // An operation that ends inside its call runs no callbacks, and waiting for it runs none either.
    const auto until = std::chrono::steady_clock::now() + 30s;
    for (std::int32_t missing = 1; missing != 0 && std::chrono::steady_clock::now() < until;) {
      first.start(world).wait();
      missing = called_by == std::thread::id() ? 1 : 0;
      world.all_reduce(view_of(&missing, 1), view_of(&missing, 1), ReduceOp::max()).wait();
    }
    EXPECT_EQ(called_by, std::this_thread::get_id());
  });
}

/// A callback that takes a lock which the issuing thread holds must not run inside a call that issues.
TEST(Progress, IssuingCallsRunNoCallbacks) {
  run_ranks(2, [](Communicator& world) {
    const std::thread::id issuer = std::this_thread::get_id();
    bool issuing = false;  // only the issuer reads and writes it
    std::atomic<int> called{0};
    int called_while_issuing = 0;
    constexpr int kCalls = 200;
    std::vector<Sum> sums;
    for (int i = 0; i < kCalls; ++i) sums.emplace_back(world, i % 2 == 0 ? kLarge / 10 : 3);
    for (Sum& sum : sums) {
      issuing = true;
      Work work = sum.start(world);
      issuing = false;
      work.on_done([&](const std::exception_ptr&) {
        if (std::this_thread::get_id() == issuer && issuing) ++called_while_issuing;
        ++called;
      });
      work.detach();
    }
    while (called.load() < kCalls) std::this_thread::yield();
    for (const Sum& sum : sums) sum.check(world);
    EXPECT_EQ(called_while_issuing, 0);
  });
}

/// Returns how long rank 0 waits for a large all_reduce that the other rank issues before it sleeps outside the
/// library, after `before` operations that were waited for at once.
std::chrono::steady_clock::duration wait_beside_a_waiter(bool progress_thread, std::chrono::milliseconds nap,
                                                         int before = 0) {
  InitOptions config = quick_config();
  config.progress_thread = progress_thread;
  std::chrono::steady_clock::duration waited{};
  run_threads(2, config, [&](Communicator& world) {
    Sum sum(world, kLarge);
    for (int i = 0; i < before; ++i) sum.start(world).wait();
    world.barrier().wait();
    const auto start = std::chrono::steady_clock::now();
    Work work = sum.start(world);
    if (world.rank() == 1) {
      std::this_thread::sleep_for(nap);
    } else {
      work.wait();
      waited = std::chrono::steady_clock::now() - start;
    }
    work.wait();
    sum.check(world);
  });
  return waited;
}

TEST(Progress, SleepingRankDelaysNoOther) { EXPECT_LT(wait_beside_a_waiter(true, 1000ms), 500ms); }

TEST(Progress, RankThatAlwaysWaitedBeforeDelaysNoOther) {  // so its progress thread was not woken
  EXPECT_LT(wait_beside_a_waiter(true, 1000ms, 200), 500ms);
}

TEST(Progress, DetectsMissingProgressThread) {  // negative control of the test above
  EXPECT_GE(wait_beside_a_waiter(false, 300ms), 250ms);
}

TEST(Progress, CompletesWithoutWait) {
  run_ranks(2, [](Communicator& world) {
    Sum sum(world, kLarge);
    Work work = sum.start(world);
    const auto until = std::chrono::steady_clock::now() + 10s;
    while (!work.done() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(work.done());
    sum.check(world);
  });
}

/// Runs the same seeded sequence of operations on every member of a group. Sizes and kinds are random, and some
/// operations stay in flight.
void random_operations(Communicator& comm, std::uint32_t seed, int operations) {
  std::mt19937 random(seed);
  std::vector<Sum> sums;
  sums.reserve(static_cast<std::size_t>(operations));
  std::vector<Work> works;
  std::vector<std::vector<float>> gathered;
  gathered.reserve(static_cast<std::size_t>(operations));
  for (int i = 0; i < operations; ++i) {
    const std::size_t count = random() % 4 == 0 ? random() % 200'000 : random() % 3000;
    const bool waits = random() % 2 == 0;
    sums.emplace_back(comm, count);
    switch (random() % 4) {
      case 0:
        gathered.emplace_back(count * static_cast<std::size_t>(comm.size()));
        works.push_back(comm.all_gather(view_of(sums.back().in.data(), count),
                                        view_of(gathered.back().data(), gathered.back().size())));
        sums.back().out.assign(count, sum_of_ranks(comm.size()));
        break;
      case 1:
        works.push_back(comm.barrier());
        sums.back().out.assign(count, sum_of_ranks(comm.size()));
        break;
      default:
        works.push_back(sums.back().start(comm));
    }
    if (waits && !works.empty()) {
      works.erase(works.begin() + static_cast<std::ptrdiff_t>(random() % works.size()));  // its destructor waits
    }
  }
  works.clear();
  for (const Sum& sum : sums) sum.check(comm);
  const auto ranks = static_cast<std::size_t>(comm.size());
  for (const auto& all : gathered)
    for (std::size_t i = 0; i < all.size(); ++i) ASSERT_EQ(all[i], static_cast<float>(i / (all.size() / ranks) + 1));
}

TEST(Progress, RandomOperationsOnTwoGroupsAtOnce) {
  run_ranks(4, [](Communicator& world) {
    const auto row = world.split(world.rank() / 2, world.rank());
    const auto column = world.split(world.rank() % 2, world.rank());
    std::thread other([&] { random_operations(*column, 7, 40); });  // the same seeds on all ranks
    random_operations(*row, 11, 40);
    other.join();
    random_operations(world, 13, 10);
  });
}

TEST(Progress, LazyStreamsAreOrderedWithOperations) {
  run_ranks(2, [](Communicator& world) {
    const auto stream = make_lazy_stream();
    Sum sum(world, 1000);
    std::fill(sum.in.begin(), sum.in.end(), 0.0f);
    stream->run([&] { std::fill(sum.in.begin(), sum.in.end(), static_cast<float>(world.rank() + 1)); });
    float seen = 0;
    {
      Work work = world.all_reduce(view_of(sum.in.data(), 1000), view_of(sum.out.data(), 1000), ReduceOp::sum(),
                                   {.after = stream.get()});
      work.wait_on(*stream);
    }
    stream->run([&] { seen = sum.out[999]; });
    EXPECT_EQ(seen, 0);
    stream->synchronize();
    EXPECT_EQ(seen, 3);
  });
}

TEST(Progress,
     WithoutAfterTheOperationReadsTooEarly) {  // negative control: the lazy stream exposes a missing dependency
  run_ranks(2, [](Communicator& world) {
    const auto stream = make_lazy_stream();
    Sum sum(world, 1000);
    std::fill(sum.in.begin(), sum.in.end(), 0.0f);
    stream->run([&] { std::fill(sum.in.begin(), sum.in.end(), static_cast<float>(world.rank() + 1)); });
    sum.start(world).wait();
    EXPECT_EQ(sum.out[0], 0);
    stream->synchronize();
  });
}

}  // namespace
}  // namespace tessera::comm_test
