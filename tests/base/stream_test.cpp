#include "tessera/base/stream.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cfenv>
#include <functional>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "tessera/base/thread.h"

namespace tessera::base {
namespace {

TEST(Event, DefaultEventIsCompleted) {
  const Event event;
  EXPECT_TRUE(event.done());
  event.wait();
}

TEST(ImmediateStream, RunsAtOnce) {
  const auto stream = make_immediate_stream();
  EXPECT_TRUE(stream->immediate());
  int value = 0;
  stream->run([&] { value = 1; });
  EXPECT_EQ(value, 1);
  const std::int64_t before = host_time_ns();
  const Event event = stream->record();
  EXPECT_TRUE(event.done());
  EXPECT_GE(event.time_ns(), before);
  EXPECT_LE(event.time_ns(), host_time_ns());
}

/// A third in f32, rounded as the thread rounds.
float third() {
  volatile float one = 1;
  volatile float three = 3;
  return one / three;
}

TEST(FpEnvironment, StreamsAndThreadsComputeInTheDefault) {
  const float nearest = third();
  std::fesetround(FE_DOWNWARD);
  const float down = third();
  float in_stream = 0;
  float in_lazy_stream = 0;
  float in_thread = 0;
  make_immediate_stream()->run([&] { in_stream = third(); });
  const auto lazy = make_lazy_stream();
  lazy->run([&] { in_lazy_stream = third(); });
  lazy->synchronize();
  start_thread([&] { in_thread = third(); }).join();
  const int mode = std::fegetround();
  std::fesetround(FE_TONEAREST);
  EXPECT_NE(down, nearest);  // the control
  EXPECT_EQ(in_stream, nearest);
  EXPECT_EQ(in_lazy_stream, nearest);
  EXPECT_EQ(in_thread, nearest);
  EXPECT_EQ(mode, FE_DOWNWARD);  // the caller's is restored
}

TEST(Threads, OfTheLibraryTakeNoSignals) {
  const auto blocked = [](const std::function<std::thread(std::function<void()>)>& start) {
    sigset_t mask;
    start([&] { ::pthread_sigmask(SIG_SETMASK, nullptr, &mask); }).join();
    return std::pair(::sigismember(&mask, SIGUSR1), ::sigismember(&mask, SIGSEGV));
  };
  EXPECT_EQ(blocked(start_thread), std::pair(1, 0));
  EXPECT_EQ(blocked(start_program_thread), std::pair(0, 0));  // the control
}

TEST(ImmediateStream, ThrowsAtOnceAndStaysUsable) {
  const auto stream = make_immediate_stream();
  int seen = 0;
  EXPECT_THROW(stream->run([] { throw std::runtime_error("x"); }), std::runtime_error);
  stream->run([&] { seen = 4; });
  EXPECT_EQ(seen, 4);
}

TEST(ImmediateStream, WaitsForEventOfOtherStream) {
  const auto lazy = make_lazy_stream();
  const auto immediate = make_immediate_stream();
  int value = 0;
  lazy->run([&] { value = 1; });
  immediate->wait(lazy->record());
  EXPECT_EQ(value, 1);
}

TEST(LazyStream, RunsAwaitedWorkInOrder) {
  const auto stream = make_lazy_stream();
  EXPECT_FALSE(stream->immediate());
  std::vector<int> order;
  stream->run([&] { order.push_back(1); });
  const Event first = stream->record_timed();
  stream->run([&] { order.push_back(2); });
  const Event second = stream->record_timed();
  stream->run([&] { order.push_back(3); });
  EXPECT_TRUE(order.empty());
  EXPECT_FALSE(first.done());
  first.wait();
  EXPECT_EQ(order, (std::vector<int>{1}));
  EXPECT_TRUE(first.done());
  EXPECT_FALSE(second.done());
  stream->synchronize();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
  first.wait();  // a second wait runs nothing twice
  EXPECT_EQ(order.size(), 3U);
  EXPECT_LE(first.time_ns(), second.time_ns());
  EXPECT_GT(first.time_ns(), 0);
}

TEST(LazyStream, RunsWorkOfOtherStreams) {
  const auto compute = make_lazy_stream();
  const auto transfer = make_lazy_stream();
  std::vector<int> order;
  compute->run([&] { order.push_back(1); });
  transfer->wait(compute->record());
  transfer->run([&] { order.push_back(2); });
  compute->wait(transfer->record());
  compute->run([&] { order.push_back(3); });
  EXPECT_TRUE(order.empty());
  compute->synchronize();
  EXPECT_EQ(order, (std::vector<int>{1, 2, 3}));
}

TEST(LazyStream, DetectsMissingDependency) {  // negative control: the purpose of the lazy stream
  const auto producer = make_lazy_stream();
  const auto consumer = make_lazy_stream();
  int value = 0;
  int seen = -1;
  producer->run([&] { value = 7; });
  consumer->run([&] { seen = value; });  // without consumer->wait(producer->record())
  consumer->synchronize();
  EXPECT_EQ(seen, 0);
  producer->synchronize();
}

TEST(LazyStream, WaitThrowsAndStreamStaysUsable) {
  const auto stream = make_lazy_stream();
  int ran = 0;
  stream->run([] { throw std::runtime_error("first"); });
  stream->run([&] { ++ran; });
  const Event event = stream->record();
  EXPECT_THROW(event.wait(), std::runtime_error);
  EXPECT_FALSE(event.done());
  EXPECT_EQ(ran, 0);
  event.wait();
  EXPECT_TRUE(event.done());
  EXPECT_EQ(ran, 1);
}

TEST(LazyStream, ExceptionsCrossStreams) {
  const auto producer = make_lazy_stream();
  const auto consumer = make_lazy_stream();
  producer->run([] { throw std::runtime_error("lost"); });
  consumer->wait(producer->record());
  int ran = 0;
  consumer->run([&] { ++ran; });
  EXPECT_THROW(consumer->synchronize(), std::runtime_error);
  consumer->synchronize();
  EXPECT_EQ(ran, 1);
}

TEST(LazyStream, EventsOutliveStream) {
  auto stream = make_lazy_stream();
  int value = 0;
  stream->run([&] { value = 1; });
  const Event event = stream->record();
  stream.reset();
  event.wait();
  EXPECT_EQ(value, 1);
}

TEST(LazyStream, IgnoresWaitForItself) {
  const auto stream = make_lazy_stream();
  int value = 0;
  stream->run([&] { value = 1; });
  stream->wait(stream->record());
  stream->run([&] { value += 1; });
  stream->synchronize();
  EXPECT_EQ(value, 2);
}

TEST(LazyStream, FreesUnfinishedWork) {
  const auto witness = std::make_shared<int>(1);
  {
    const auto stream = make_lazy_stream();
    stream->run([witness] { (void)*witness; });
    stream->wait(stream->record());
    EXPECT_EQ(witness.use_count(), 2);
  }
  EXPECT_EQ(witness.use_count(), 1) << "a queue that owns an event of itself is never freed";
}

}  // namespace
}  // namespace tessera::base
