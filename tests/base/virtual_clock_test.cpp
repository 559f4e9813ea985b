#include "tessera/base/virtual_clock.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/cost_table.h"
#include "tessera/base/error.h"

namespace tessera::base {
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

  const Event reached = a->record();
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
  const auto real = make_immediate_stream();
  EXPECT_FALSE(clock.made(*theirs));
  EXPECT_THROW(clock.advance(*theirs, 1), InvalidUsage);
  EXPECT_THROW(clock.advance(*real, 1), InvalidUsage);
}

TEST(CostTable, InterpolatesBetweenMedians) {
  CostTable table;
  for (const double seconds : {1.0, 9.0, 2.0}) table.add(10, seconds);
  table.add(20, 4);
  EXPECT_DOUBLE_EQ(table.at(10), 2);
  EXPECT_DOUBLE_EQ(table.at(15), 3);
  EXPECT_DOUBLE_EQ(table.at(20), 4);
  EXPECT_DOUBLE_EQ(table.at(50), 10);  // proportional to the last point
  EXPECT_DOUBLE_EQ(table.at(5), 1);    // proportional to the first point
}

TEST(CostTable, IsMonotonic) {
  CostTable table;
  table.add(1, 3);
  table.add(2, 1);  // noise
  table.add(3, 5);
  EXPECT_DOUBLE_EQ(table.at(1), 2);
  EXPECT_DOUBLE_EQ(table.at(2), 2);
  EXPECT_DOUBLE_EQ(table.at(2.5), 3.5);
  table.add(4, 2);
  table.add(5, 2);
  for (const double size : {3.0, 3.5, 4.0, 5.0}) EXPECT_DOUBLE_EQ(table.at(size), 3);  // one outlier, not its maximum
  EXPECT_DOUBLE_EQ(CostTable().at(7), 0);
}

TEST(CostTable, RejectsInvalidTimes) {
  CostTable table;
  EXPECT_THROW(table.add(-1, 1), InvalidUsage);
  EXPECT_THROW(table.add(1, -1), InvalidUsage);
  EXPECT_THROW(table.add(1, 1.0 / 0.0), InvalidUsage);
  EXPECT_TRUE(table.empty());
}

}  // namespace
}  // namespace tessera::base
