// Which threads call NCCL, and what callers do while a call waits for another rank.
#include "backends/nccl/call_threads.h"

#include <latch>
#include <set>

#include "tests/backends/nccl/support.h"

namespace tessera::nccl_test {
namespace {

using Clock = std::chrono::steady_clock;
using comm::nccl::CallThreads;

void wait_for(const CallThreads::Call& call) {
  const auto until = Clock::now() + 20s;
  while (!call.done() && Clock::now() < until) std::this_thread::sleep_for(100us);
  ASSERT_TRUE(call.done());
}

void all_reduce(Communicator& comm, int device, OpOptions options = {}) {
  OnDevice<float> x(comm, device, 8, 1);
  comm.all_reduce(x.view(), x.view(), ReduceOp::sum(), options).wait();
  EXPECT_EQ(x.values(), std::vector<float>(8, static_cast<float>(comm.size())));
}

TEST(NcclCallThreads, CallsThatFollowOneAnotherShareAThread) {
  CallThreads threads;
  std::set<std::thread::id> ids;
  for (int i = 0; i < 100; ++i) {
    const auto call = threads.start([&] { ids.insert(std::this_thread::get_id()); });
    wait_for(*call);
    if (i == 50) std::this_thread::sleep_for(20ms);  // the thread sleeps
  }
  EXPECT_EQ(ids.size(), 1u);
  EXPECT_FALSE(ids.contains(std::this_thread::get_id()));
  EXPECT_EQ(threads.count(), 1);
}

TEST(NcclCallThreads, CallThatBlocksDelaysNoOther) {
  CallThreads threads;
  std::latch second_has_run(1);
  const auto first = threads.start([&] { second_has_run.wait(); });
  const auto second = threads.start([&] { second_has_run.count_down(); });
  wait_for(*first);
  wait_for(*second);
  EXPECT_EQ(threads.count(), 2);
}

TEST(NcclCallThreads, CallerGetsTheException) {
  CallThreads threads;
  const auto call = threads.start([] { throw BackendError("of the call"); });
  wait_for(*call);
  EXPECT_EQ(error_of([&] { call->rethrow(); }), "BackendError: of the call");
}

/// A call that has ended holds nothing, even while its handle lives: a communicator may be what it held.
TEST(NcclCallThreads, CallThatHasEndedHoldsNothing) {
  CallThreads threads;
  const auto held = std::make_shared<int>(1);
  const auto call = threads.start([held] {});
  wait_for(*call);
  EXPECT_EQ(held.use_count(), 1);
}

TEST(NcclCallThreads, EndDoesNotWaitForCallsThatBlock) {
  const auto go = std::make_shared<std::promise<void>>();
  const auto start = Clock::now();
  std::shared_ptr<const CallThreads::Call> blocked;
  {
    CallThreads threads;
    const auto idle = threads.start([] {});
    wait_for(*idle);
    blocked = threads.start([go] { go->get_future().wait(); });
  }
  EXPECT_LT(Clock::now() - start, 5s);
  EXPECT_FALSE(blocked->done());
  go->set_value();
  wait_for(*blocked);
}

/// A rank that uses its communicators in turn calls NCCL from one thread, which is not the program's.
TEST(NcclCalls, ComeFromOneThread) {
  reset_fake();
  run_ranks(2, [](Communicator& world) {
    const auto gather = world.split(0, world.rank());
    const auto reduce = gather->split(0, world.rank());
    for (Communicator* comm : {&world, gather.get(), reduce.get()}) all_reduce(*comm, world.rank());
    const FakeCounts counts = fake_counts();
    const auto& callers = counts.callers.at(world.rank());
    EXPECT_EQ(callers.size(), 1u);
    EXPECT_FALSE(callers.contains(std::this_thread::get_id()));
  });
}

/// The first operation of a communicator blocks its call until the other ranks come. Two threads of a rank that use two
/// communicators in another order than those of the other rank don't wait for each other.
TEST(NcclCalls, OfTwoCommunicatorsDoNotBlockEachOther) {
  reset_fake({.connects = true});
  std::latch first_calls(2);
  run_ranks(2, [&](Communicator& world) {
    const auto other = world.split(0, world.rank());
    Communicator* const order[] = {world.rank() == 0 ? &world : other.get(), world.rank() == 0 ? other.get() : &world};
    const auto begin = [&](Communicator& comm, bool second) {
      if (second)
        std::this_thread::sleep_for(100ms);  // the first one is in its call
      else
        first_calls.arrive_and_wait();
      all_reduce(comm, world.rank());
    };
    std::thread second([&] { begin(*order[1], true); });
    begin(*order[0], false);
    second.join();
  });
}

/// With ncclCommRevoke, which lets a call return before the communicator is freed, and in an older library without it.
TEST(NcclCalls, ThatBlockEndAtTheDeadline) {
  static const comm::nccl::NcclApi old = [] {
    comm::nccl::NcclApi api = fake_api();
    api.ncclCommRevoke = nullptr;
    return api;
  }();
  for (const bool revokes : {true, false}) {
    reset_fake({.connects = true});
    const auto body = [](Communicator& world) {
      std::this_thread::sleep_for(50ms);
      if (world.rank() == 2) {
        std::this_thread::sleep_for(1500ms);
        EXPECT_TRUE(error_of([&] { world.barrier(); }).starts_with("Timeout: ")) << "told by the others";
        return;
      }
      const auto start = Clock::now();
      EXPECT_EQ(error_of([&] { all_reduce(world, world.rank(), {.timeout = 300ms, .label = "block.3"}); }),
                "Timeout: all_reduce #1 (block.3): not done within 300ms; rank 2 is behind at operation #0");
      EXPECT_LT(Clock::now() - start, 4s);
    };
    const auto errors = run_world(3, quick_options(), body, revokes ? fake_api() : old);
    EXPECT_EQ(errors, std::vector<std::string>(3));
    const FakeCounts counts = fake_counts();
    EXPECT_EQ(counts.complaint, "");
    EXPECT_EQ(counts.revoked, revokes ? 2 : 0);
    EXPECT_TRUE(all_freed());
  }
}

std::vector<std::string> leaks_logged(int ranks, const std::function<void(Communicator&)>& body) {
  std::vector<std::string> lines;
  std::mutex mutex;
  BackendOptions options = quick_options();
  options.communicator.logger = std::make_shared<Logger>(LogLevel::warn, [&](LogLevel, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (text.find("leaked") != std::string_view::npos) lines.emplace_back(text);
  });
  run_world(ranks, options, body);
  EXPECT_EQ(fake_counts().complaint, "");
  change_fake({.calls_end = true});
  std::this_thread::sleep_for(100ms);
  return lines;
}

/// A communicator whose call does not return is not freed: the fake complains about an abort beside the call.
TEST(NcclCalls, ThatDoNotReturnKeepTheirCommunicator) {
  const std::string line = "nccl: a communicator could not be aborted and is leaked";
  const auto close = [](Communicator& world) { world.barrier().wait(); };
  reset_fake({.close_hangs = true});
  EXPECT_EQ(leaks_logged(1, close), std::vector<std::string>(1, line));
  EXPECT_EQ(fake_counts().communicators, 1);
  reset_fake();
  EXPECT_EQ(leaks_logged(1, close), std::vector<std::string>()) << "the control";

  reset_fake({.connects = true, .revokes = false});
  const auto lines = leaks_logged(2, [](Communicator& world) {
    if (world.rank() == 0)
      EXPECT_TRUE(
          error_of([&] { world.barrier({.timeout = 200ms}).wait(); }).ends_with("its memory may still change)"));
    else
      std::this_thread::sleep_for(1500ms);
  });
  EXPECT_EQ(std::count(lines.begin(), lines.end(), line), 1);
  EXPECT_EQ(fake_counts().communicators, 1);
}

/// An abort frees the communicator, so it waits for calls that are about to return; the fake complains if it does not.
TEST(NcclCalls, AbortWaitsForCalls) {
  reset_fake({.polls = 300});  // 20 ms or so
  std::latch both_made(2);     // an abort would end a rank that still makes its communicator
  const auto errors = run_world(2, quick_options(), [&](Communicator& world) {
    both_made.arrive_and_wait();
    std::thread other([&] {
      std::this_thread::sleep_for(5ms);
      if (world.rank() == 0) world.abort("enough");
    });
    EXPECT_EQ(error_of([&] { all_reduce(world, world.rank()); }), "Aborted: rank 0 aborted: enough");
    other.join();
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_EQ(fake_counts().complaint, "");
  EXPECT_EQ(fake_counts().revoked, 0);
  EXPECT_TRUE(all_freed());
}

/// NCCL_COMM_BLOCKING=0 makes all communicators non-blocking: calls return at once and are polled.
TEST(NcclCalls, WorkWithNonBlockingCommunicators) {
  reset_fake({.non_blocking = true});
  run_ranks(3, [](Communicator& world) {
    all_reduce(world, world.rank());
    const auto copy = world.split(0, world.rank());
    const auto part = world.split(world.rank() % 2, 0);
    const auto group = world.create_group(std::array{0, 1, 2});
    for (Communicator* comm : {copy.get(), part.get(), group.get()}) all_reduce(*comm, world.rank());
  });
  reset_fake({.non_blocking = true, .init_hangs = true});
  BackendOptions options = quick_options();
  options.communicator.timeout = 300ms;
  for (const std::string& error : run_world(2, options, [](Communicator&) {}))
    EXPECT_EQ(error, "Timeout: nccl: the communicator of 2 ranks was not ready within 300ms");
  EXPECT_TRUE(all_freed());
}

/// A split with all ranks in their order shares what NCCL needs for a communicator; other splits and groups do not.
TEST(NcclFamilies, AreDuplicates) {
  const auto shared_by = [](const std::function<std::unique_ptr<Communicator>(Communicator&)>& make) {
    reset_fake();
    run_ranks(4, [&](Communicator& world) { all_reduce(*make(world), world.rank()); });
    EXPECT_EQ(fake_counts().created, 8);
    return fake_counts().shared;
  };
  EXPECT_EQ(shared_by([](Communicator& world) { return world.split(7, world.rank()); }), 4);
  EXPECT_EQ(shared_by([](Communicator& world) { return world.split(0, -world.rank()); }), 0) << "another order";
  EXPECT_EQ(shared_by([](Communicator& world) { return world.split(world.rank() / 2, 0); }), 0);
  EXPECT_EQ(shared_by([](Communicator& world) { return world.create_group(std::array{0, 1, 2, 3}); }), 0);
}

/// NCCL makes communicators that share resources unusable when one of them is aborted.
TEST(NcclFamilies, FailTogether) {
  reset_fake();
  std::latch before(4), after(4);
  const auto errors = run_world(4, quick_options(), [&](Communicator& world) {
    const auto half = world.split(world.rank() / 2, 0);
    const auto copy = half->split(0, half->rank());
    const auto copy_of_copy = copy->split(0, half->rank());
    before.arrive_and_wait();
    if (world.rank() == 0) copy->abort("only us");
    const std::string expected = world.rank() < 2 ? "Aborted: rank 0 aborted: only us" : "";
    for (Communicator* comm : {copy_of_copy.get(), half.get(), copy.get()})
      EXPECT_EQ(error_of([&] { all_reduce(*comm, world.rank()); }), expected);
    after.arrive_and_wait();
    all_reduce(world, world.rank());  // it shares nothing with them
  });
  EXPECT_EQ(errors, std::vector<std::string>(4));
  EXPECT_EQ(fake_counts().complaint, "");
  EXPECT_TRUE(all_freed());
}

/// A call on one of them may begin while another rank's abort of another arrives: none is freed before it has returned.
TEST(NcclFamilies, CallsReturnBeforeTheFirstAbort) {
  for (int round = 0; round < 10; ++round) {
    reset_fake({.delay_ms = 3});
    std::latch before(2);
    run_world(2, quick_options(), [&](Communicator& world) {
      const auto half = world.split(0, -world.rank());
      const auto copy = half->split(0, half->rank());
      before.arrive_and_wait();
      if (world.rank() == 0) half->abort("only us");
      while (error_of([&] { all_reduce(*copy, world.rank()); }).empty()) {
      }
    });
    ASSERT_EQ(fake_counts().complaint, "") << "in round " << round;
    ASSERT_TRUE(all_freed());
  }
}

TEST(NcclFamilies, OutliveTheirMembers) {
  reset_fake();
  run_ranks(2, [](Communicator& world) {
    auto copy = world.split(0, world.rank());
    all_reduce(*copy, world.rank());
    copy.reset();
    all_reduce(world, world.rank());
    copy = world.split(0, world.rank());
    all_reduce(*copy, world.rank());
  });
}

}  // namespace
}  // namespace tessera::nccl_test
