// The _v operations, whose parts have different lengths.
#include <numeric>

#include "tessera/comm/communicator.h"
#include "tessera/comm/core/argument_checker.h"

namespace tessera::comm {
namespace {

std::size_t offset_of(std::span<const std::size_t> counts, int rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, std::size_t{0});
}

}  // namespace

Work Communicator::all_gather_v(ConstView in, View out, std::span<const std::size_t> counts, OpOptions options) {
  OpDesc call{.kind = OpKind::all_gather, .in = in, .out = out, .out_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.views();
  check.counts(counts, out.count, "out");
  check.own_part(counts, in.count, "in");
  check.overlap_in_is_part_of_out(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::reduce_scatter_v(ConstView in, View out, std::span<const std::size_t> counts, ReduceOp op,
                                    OpOptions options) {
  OpDesc call{.kind = OpKind::reduce_scatter, .in = in, .out = out, .op = op, .in_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.reduce_op();
  check.views();
  check.counts(counts, in.count, "in");
  check.own_part(counts, out.count, "out");
  check.overlap_out_is_part_of_in(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::gather_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::gather, .in = in, .out = out, .root = root, .out_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.out = View{nullptr, 0, in.dtype, in.device};
  check.views();
  check.counts(counts, rank_ == root ? out.count : offset_of(counts, static_cast<int>(counts.size())), "out");
  check.own_part(counts, in.count, "in");
  if (rank_ == root) check.overlap_in_is_part_of_out(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::scatter_v(ConstView in, View out, std::span<const std::size_t> counts, int root, OpOptions options) {
  OpDesc call{.kind = OpKind::scatter, .in = in, .out = out, .root = root, .in_counts = counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.root();
  if (rank_ != root) call.in = ConstView{nullptr, 0, out.dtype, out.device};
  check.views();
  check.counts(counts, rank_ == root ? in.count : offset_of(counts, static_cast<int>(counts.size())), "in");
  check.own_part(counts, out.count, "out");
  if (rank_ == root) check.overlap_out_is_part_of_in(offset_of(counts, rank_));
  return start(call, options);
}

Work Communicator::all_to_all_v(ConstView in, std::span<const std::size_t> in_counts, View out,
                                std::span<const std::size_t> out_counts, OpOptions options) {
  OpDesc call{.kind = OpKind::all_to_all, .in = in, .out = out, .in_counts = in_counts, .out_counts = out_counts};
  const ArgumentChecker check(call, capabilities(), rank_, size_);
  check.views();
  check.counts(in_counts, in.count, "in");
  check.counts(out_counts, out.count, "out");
  const auto own = static_cast<std::size_t>(rank_);
  if (in_counts[own] != out_counts[own])
    throw InvalidUsage("all_to_all: in_counts[" + std::to_string(own) + "] is " + std::to_string(in_counts[own]) +
                       " but out_counts of the same rank is " + std::to_string(out_counts[own]));
  check.overlap_never();
  return start(call, options);
}

}  // namespace tessera::comm
