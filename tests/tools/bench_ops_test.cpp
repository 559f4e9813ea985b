// Sizes, factors and traffic of `bench` operations, against nccl-tests' formulas computed by hand.
#include "tools/bench/operations.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tessera/base/error.h"
#include "tools/bench/memory_bound.h"

namespace tessera::tools {
namespace {

using base::DType;
using testing::HasSubstr;

struct Row {
  const char* op;
  std::size_t bytes, count, in_count, out_count;
  double factor;
};

TEST(BenchOps, ShapesAndFactorsEqualNcclTests) {
  // 1000 bytes of f32 on 3 ranks: 250 elements in all, 83 per slice.
  const std::vector<Row> rows = {{"all_reduce", 1000, 250, 250, 250, 4.0 / 3},
                                 {"all_gather", 996, 83, 83, 249, 2.0 / 3},
                                 {"reduce_scatter", 996, 83, 249, 83, 2.0 / 3},
                                 {"broadcast", 1000, 250, 250, 250, 1},
                                 {"reduce", 1000, 250, 250, 250, 1},
                                 {"gather", 996, 83, 83, 249, 2.0 / 3},
                                 {"scatter", 996, 83, 249, 83, 2.0 / 3},
                                 {"all_to_all", 996, 83, 249, 249, 2.0 / 3},
                                 {"send_recv", 1000, 250, 250, 250, 1},
                                 {"ping_pong", 1000, 250, 250, 250, 1},
                                 {"window", 1000, 250, 250, 250, 1},
                                 {"bidirectional", 1000, 250, 250, 250, 3},
                                 {"put", 1000, 250, 250, 250, 1},
                                 {"get", 1000, 250, 250, 250, 1},
                                 {"barrier", 0, 0, 0, 0, 1},
                                 // Parts in proportion to 1, 2, 3: they end at 250/6 = 41, 125 and 250.
                                 {"all_gather_v", 1000, 83, 41, 250, 5.0 / 6},
                                 {"reduce_scatter_v", 1000, 83, 250, 41, 5.0 / 6},
                                 {"gather_v", 1000, 83, 41, 250, 5.0 / 6},
                                 {"scatter_v", 1000, 83, 250, 41, 5.0 / 6},
                                 {"all_to_all_v", 1000, 83, 250, 123, 1}};
  ASSERT_EQ(rows.size(), bench_ops().size());
  for (const Row& row : rows) {
    const BenchOp& op = bench_op(row.op);
    const BenchShape shape = bench_shape(op, 1000, DType::f32, 3);
    EXPECT_EQ(shape.bytes, row.bytes) << row.op;
    EXPECT_EQ(shape.count, row.count) << row.op;
    EXPECT_EQ(shape.in_count, row.in_count) << row.op;
    EXPECT_EQ(shape.out_count, row.out_count) << row.op;
    EXPECT_DOUBLE_EQ(bus_factor(op, 3), row.factor) << row.op;
    const BenchShape again = bench_shape(op, shape.bytes, DType::f32, 3);
    EXPECT_EQ(again.count, shape.count) << row.op << ": rounding down twice is rounding down once";
  }
}

TEST(BenchOps, UnequalPartsHoldEveryElementOnce) {
  for (const char* name : {"all_gather_v", "all_to_all_v"})
    for (const int ranks : {1, 2, 3, 7, 64})
      for (const std::uint64_t bytes : {4U, 28U, 1000U, 4U << 20}) {
        const BenchShape shape = bench_shape(bench_op(name), bytes, DType::f32, ranks, ranks - 1);
        ASSERT_EQ(shape.counts.size(), static_cast<std::size_t>(ranks));
        EXPECT_EQ(shape.begin(ranks), bytes / 4) << name << " " << bytes << " on " << ranks;
        EXPECT_EQ(shape.bytes, bytes);
        const double shares = ranks * (ranks + 1) / 2.0;
        for (int k = 0; k < ranks; ++k)
          EXPECT_NEAR(static_cast<double>(shape.part(k)), static_cast<double>(bytes / 4) * (k + 1) / shares, 1) << name;
      }
  const BenchShape large = bench_shape(bench_op("scatter_v"), std::uint64_t{1} << 40, DType::u8, 4);
  EXPECT_EQ(large.counts.front(), (std::uint64_t{1} << 40) / 10);
  EXPECT_EQ(large.begin(4), std::uint64_t{1} << 40);
}

TEST(BenchOps, SizesBelowOneElementAreZeroRows) {
  EXPECT_EQ(bench_shape(bench_op("all_gather"), 8, DType::f32, 4).bytes, 0U);
  EXPECT_EQ(bench_shape(bench_op("all_reduce"), 8, DType::f32, 4).bytes, 8U);
  EXPECT_EQ(bench_shape(bench_op("all_reduce"), 7, DType::f64, 4).bytes, 0U);
  EXPECT_EQ(bench_shape(bench_op("all_gather"), 16, DType::f32, 4).bytes, 16U);
}

TEST(BenchOps, OneRankHasNoBusTraffic) {
  EXPECT_EQ(bus_factor(bench_op("all_reduce"), 1), 0);
  EXPECT_EQ(bus_factor(bench_op("all_gather"), 1), 0);
}

TEST(BenchOps, ErrorForUnknownNameListsAll) {
  try {
    bench_op("allreduce");
    FAIL();
  } catch (const base::InvalidUsage& error) {
    EXPECT_THAT(error.what(), HasSubstr("'allreduce'; known: all_reduce all_gather"));
  }
}

struct Totals {
  std::size_t combined_loads = 0, combined = 0, copied = 0;
  bool operator==(const Totals&) const = default;
};

Totals totals(const char* name, std::uint64_t bytes, int ranks, bool in_place) {
  const BenchOp& op = bench_op(name);
  Totals sum;
  for (int rank = 0; rank < ranks; ++rank) {
    const BenchShape shape = bench_shape(op, bytes, DType::f32, ranks, rank);
    const MemoryTraffic t =
        bench_traffic({&op, DType::f32, comm::ReduceOp::Kind::sum, ranks, 1}, shape, rank, in_place);
    sum.combined_loads += t.combined * static_cast<std::size_t>(t.sources);
    sum.combined += t.combined;
    sum.copied += t.copied;
  }
  return sum;
}

TEST(BenchOps, TrafficAddsUpOverRanks) {
  // S = 1008 bytes on 4 ranks; all_reduce combines n S into S and copies (n-1) S, whether or not the slices are equal.
  EXPECT_EQ(totals("all_reduce", 1008, 4, false), (Totals{4032, 1008, 3024}));
  EXPECT_EQ(totals("all_reduce", 1004, 4, true), (Totals{4016, 1004, 3012})) << "251 elements in 4 slices";
  EXPECT_EQ(totals("reduce_scatter", 1008, 4, false), (Totals{4032, 1008, 0}));
  EXPECT_EQ(totals("reduce", 1008, 4, false), (Totals{4032, 1008, 0}));
  EXPECT_EQ(totals("all_gather", 1008, 4, false), (Totals{0, 0, 4032}));
  EXPECT_EQ(totals("all_gather", 1008, 4, true), (Totals{0, 0, 3024})) << "the own part is there";
  EXPECT_EQ(totals("broadcast", 1008, 4, false), (Totals{0, 0, 4032}));
  EXPECT_EQ(totals("broadcast", 1008, 4, true), (Totals{0, 0, 3024}));
  EXPECT_EQ(totals("gather", 1008, 4, false), (Totals{0, 0, 1008}));
  EXPECT_EQ(totals("gather", 1008, 4, true), (Totals{0, 0, 756}));
  EXPECT_EQ(totals("scatter", 1008, 4, true), (Totals{0, 0, 756}));
  EXPECT_EQ(totals("all_to_all", 1008, 4, false), (Totals{0, 0, 4032}));
  EXPECT_EQ(totals("all_gather_v", 1008, 4, true), (Totals{0, 0, 3024}));
  EXPECT_EQ(totals("scatter_v", 1008, 4, false), (Totals{0, 0, 1008}));
  EXPECT_EQ(totals("reduce_scatter_v", 1008, 4, false), (Totals{4032, 1008, 0}));
  EXPECT_EQ(totals("all_to_all_v", 1008, 4, false), (Totals{0, 0, 4032}));
  EXPECT_EQ(totals("barrier", 1008, 4, false), Totals{});
  EXPECT_EQ(totals("all_reduce", 0, 4, false), Totals{});
}

TEST(BenchBound, BothStoreKindsWriteEveryByte) {
  for (const Stores stores : {Stores::plain, Stores::non_temporal}) {
    for (const std::size_t bytes : {0, 1, 31, 64, 65, 1000}) {
      constexpr std::size_t kStride = 1024;
      alignas(64) std::byte from[3 * kStride];
      alignas(64) std::byte to[kStride + 1];
      for (std::size_t i = 0; i < sizeof from; ++i) from[i] = static_cast<std::byte>(i % 61 + i / kStride);
      std::memset(to, 0xee, sizeof to);
      combine_pass({from, kStride, 3, to, bytes}, stores);
      for (std::size_t i = 0; i < bytes; ++i)
        ASSERT_EQ(std::to_integer<int>(to[i]), std::to_integer<int>(from[i]) + std::to_integer<int>(from[kStride + i]) +
                                                   std::to_integer<int>(from[2 * kStride + i]))
            << i << " of " << bytes;
      EXPECT_EQ(to[bytes], std::byte{0xee}) << "nothing behind the end is written";
    }
  }
}

}  // namespace
}  // namespace tessera::tools
