// The values that `bench --check` sends and the expected results, computed without communication.
//
// Element i of rank r's input is a function of r and i. Inputs of sums and products are small whole numbers, chosen so
// that every partial result in any order is exact in every dtype: in whatever order a backend adds, one wrong bit is a
// wrong value. Only avg over floating types may differ by one unit in the last place, because a backend may divide
// before or after it rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tools/bench/operations.h"

namespace tessera::tools {

struct BenchData {
  const BenchOp* op = nullptr;
  base::DType dtype = base::DType::f32;
  comm::ReduceOp::Kind redop = comm::ReduceOp::Kind::sum;
  int ranks = 1;
  int root = 0;
};

/// The reduction as this rank passes it: premul_sum has a different factor on every other rank.
comm::ReduceOp bench_reduce_op(comm::ReduceOp::Kind kind, int rank);

/// Element `i` of `rank`'s input, before conversion to `dtype`.
std::int64_t bench_value(const BenchData& data, int rank, std::size_t i);

/// Writes the `count` elements of `rank`'s input.
void fill_bench_input(const BenchData& data, int rank, void* in, std::size_t count);

/// Fills memory with bytes that no result contains: NaN, or a value outside the range of the inputs.
void poison(void* data, std::size_t bytes);

/// A part of a rank's output and the source of its expected values.
struct ExpectedPart {
  static constexpr int kAll = -1;  ///< `source`: combined over all ranks
  std::size_t out_offset = 0;
  int source = 0;
  std::size_t in_offset = 0;
  std::size_t count = 0;
};
/// Empty if this rank gets no output.
std::vector<ExpectedPart> expected_parts(const BenchData& data, const BenchShape& shape, int rank);

/// Number of wrong elements in `rank`'s output.
std::uint64_t count_wrong(const BenchData& data, const BenchShape& shape, int rank, const void* out);

}  // namespace tessera::tools
