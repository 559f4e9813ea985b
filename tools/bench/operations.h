// The operations that `bench` measures: their shapes, the bytes that each rank must load and store, and the values that
// `--check` sends and expects.
//
// Element i of rank r's input is a function of r and i, so expected results are computed without communication. Inputs
// of sums and products are small whole numbers, chosen so that every partial result in any order is exact in every
// dtype: in whatever order a backend adds, one wrong bit is a wrong value. Only avg over floating types may differ by
// one unit in the last place, because a backend may divide before or after it rounds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/comm/core/op_traits.h"

namespace tessera::tools {

/// Who sends to whom in operations of OpKind::send. All but the ring are between ranks r and r + n/2, as in OSU's
/// programs.
enum class Exchange : std::uint8_t {
  ring,           ///< every rank sends to the next one, while receiving from the previous one
  ping_pong,      ///< kRoundTrips round trips
  window,         ///< kWindow messages at once from the lower rank, and an answer when all have arrived
  bidirectional,  ///< kWindow messages at once in each direction
  put,            ///< as ping_pong, of puts and signals
  get,            ///< kRoundTrips gets by the lower rank
};
inline constexpr int kRoundTrips = 10;
inline constexpr int kWindow = 64;

struct BenchOp {
  std::string_view name;
  comm::OpKind kind = comm::OpKind::all_reduce;
  Exchange exchange = Exchange::ring;
  bool unequal = false;  ///< the parts grow in proportion to 1, 2, 3 .. over the ranks: the form with _v
  bool reduces = comm::reduces(kind);
  bool rooted = comm::has_root(kind);
  bool in_place = reduces || rooted || kind == comm::OpKind::all_gather;  ///< has a form with in and out in one memory
};

/// What the time of BenchCall::run() is divided by: messages of one direction, one after the other.
int messages_of(const BenchOp& op);
/// The rank that this one exchanges messages with, if the operation isn't a ring.
int partner_of(int rank, int ranks);

std::span<const BenchOp> bench_ops();
/// Throws InvalidUsage listing the known names.
const BenchOp& bench_op(std::string_view name);

/// One size of one operation. `bytes` is the total, as nccl-tests counts: the larger of the two buffers. If the
/// operation divides a buffer into parts, `count` is that of one part, and the remainder is not sent.
struct BenchShape {
  std::size_t bytes = 0;      ///< the column `size`
  std::size_t count = 0;      ///< the column `count`: elements, per rank if the operation has a part for each rank
  std::size_t in_count = 0;   ///< elements of a rank's input, if it has one
  std::size_t out_count = 0;  ///< elements of a rank's output, if it has one
  std::vector<std::size_t> counts = {};  ///< of each rank's part, if they are unequal; `count` is then their mean

  std::size_t part(int rank) const { return counts.empty() ? count : counts[static_cast<std::size_t>(rank)]; }
  /// Where a rank's part begins.
  std::size_t begin(int rank) const;
};
/// Only parts that are unequal depend on the rank.
BenchShape bench_shape(const BenchOp& op, std::uint64_t bytes, base::DType dtype, int ranks, int rank = 0);

/// busbw / algbw as in nccl-tests' page on performance: the share of `bytes` that must cross the busiest link of an
/// ideal machine.
double bus_factor(const BenchOp& op, int ranks);

/// What determines the values of one operation.
struct BenchData {
  const BenchOp* op = nullptr;
  base::DType dtype = base::DType::f32;
  comm::ReduceOp::Kind redop = comm::ReduceOp::Kind::sum;
  int ranks = 1;
  int root = 0;
};

/// The memory traffic of one rank in the `direct` algorithm if every buffer can be read in place: it combines `sources`
/// sources of `combined` bytes into one (loads sources x combined, stores combined), then copies `copied` bytes (loads
/// and stores them).
struct MemoryTraffic {
  int sources = 0;
  std::size_t combined = 0;
  std::size_t copied = 0;
};
MemoryTraffic bench_traffic(const BenchData& data, const BenchShape& shape, int rank, bool in_place);

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
