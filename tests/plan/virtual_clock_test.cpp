#include "tessera/plan/virtual_clock.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::plan {
namespace {

TEST(VirtualClock, SynchronousStreamsRunOneAfterAnother) {
  VirtualClock clock(VirtualClock::Machine::synchronous);
  const auto a = clock.make_stream(), b = clock.make_stream();
  clock.advance(*a, 10);
  clock.advance(*b, 5);
  EXPECT_EQ(clock.time_of(*a), 15);
  EXPECT_EQ(clock.time_of(*b), 15);
  EXPECT_EQ(clock.host_time(), 15);
}

TEST(VirtualClock, AsynchronousStreamsRunConcurrently) {
  VirtualClock clock(VirtualClock::Machine::asynchronous);
  const auto a = clock.make_stream(), b = clock.make_stream();
  clock.advance(*a, 10);
  clock.advance(*b, 4);
  EXPECT_EQ(clock.time_of(*a), 10);
  EXPECT_EQ(clock.time_of(*b), 4);
  EXPECT_EQ(clock.host_time(), 0);  // the host has only issued work

  const base::Event reached = a->record();
  EXPECT_FALSE(reached.done());
  b->wait(reached);
  clock.advance(*b, 1);
  EXPECT_EQ(clock.time_of(*b), 11);
  EXPECT_EQ(b->record().time_ns() - reached.time_ns(), 1);

  reached.wait();  // the host waits; work that is issued now can't begin earlier
  EXPECT_TRUE(reached.done());
  const auto c = clock.make_stream();
  clock.advance(*c, 2);
  EXPECT_EQ(clock.time_of(*c), 12);
}

TEST(VirtualClock, WorkRunsAtOnce) {
  VirtualClock clock(VirtualClock::Machine::asynchronous);
  const auto stream = clock.make_stream();
  bool ran = false;
  stream->run([&] { ran = true; });
  EXPECT_TRUE(ran);
  EXPECT_EQ(clock.time_of(*stream), 0);  // no cost was declared
}

TEST(VirtualClock, RejectsStreamOfOtherClock) {
  VirtualClock clock(VirtualClock::Machine::synchronous), other(VirtualClock::Machine::synchronous);
  const auto theirs = other.make_stream();
  const auto real = base::make_immediate_stream();
  EXPECT_FALSE(clock.made(*theirs));
  EXPECT_THROW(clock.advance(*theirs, 1), base::InvalidUsage);
  EXPECT_THROW(clock.advance(*real, 1), base::InvalidUsage);
}

}  // namespace
}  // namespace tessera::plan
