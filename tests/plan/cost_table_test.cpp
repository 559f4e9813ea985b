#include "tessera/plan/cost_table.h"

#include <gtest/gtest.h>

#include "tessera/base/error.h"

namespace tessera::plan {
namespace {

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
  EXPECT_THROW(table.add(-1, 1), base::InvalidUsage);
  EXPECT_THROW(table.add(1, -1), base::InvalidUsage);
  EXPECT_THROW(table.add(1, 1.0 / 0.0), base::InvalidUsage);
  EXPECT_TRUE(table.empty());
}

}  // namespace
}  // namespace tessera::plan
