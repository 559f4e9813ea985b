#include "tessera/comm/core/op_traits.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "tessera/base/parse.h"

namespace tessera::comm {
namespace {

constexpr std::array<std::string_view, kReduceKinds> kReduceNames = {"sum",        "avg",     "prod",   "min",    "max",
                                                                     "premul_sum", "bit_and", "bit_or", "bit_xor"};
constexpr std::array<std::string_view, kOpKinds> kOpNames = {"all_reduce", "all_gather", "reduce_scatter", "broadcast",
                                                             "reduce",     "gather",     "scatter",        "all_to_all",
                                                             "send",       "recv",       "barrier"};

}  // namespace

std::string describe(const OpDesc& call, std::uint64_t sequence) {
  std::string text(name_of(call.kind));
  if (call.kind == OpKind::send) text += " to rank " + std::to_string(call.root);
  if (call.kind == OpKind::recv)
    text += call.root == kAnyRank ? " from any rank" : " from rank " + std::to_string(call.root);
  if (call.tag > 0 && call.tag <= kMaxTag) text += " tag " + std::to_string(call.tag);
  if (sequence != 0) text += " #" + std::to_string(sequence);
  if (!call.label.empty()) text += " (" + std::string(call.label) + ")";
  return text;
}

std::string describe_rank(int rank, int global_rank) {
  const std::string text = "rank " + std::to_string(rank);
  return rank == global_rank ? text : text + " (global rank " + std::to_string(global_rank) + ")";
}

std::string describe_leaving(const std::string& rank, const std::string& first_failure_cause) {
  return rank + " has closed its communicator" + (first_failure_cause.empty() ? "" : " after: " + first_failure_cause);
}

std::size_t larger_count(const OpDesc& call, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  const auto total = [](std::span<const std::size_t> counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
  };
  if (call.kind == OpKind::all_to_all) return call.in_counts.empty() ? call.in.count : 0;
  if (parts_of_out(call.kind)) return call.out_counts.empty() ? call.in.count * n : total(call.out_counts);
  if (parts_of_in(call.kind)) return call.in_counts.empty() ? call.out.count * n : total(call.in_counts);
  return std::max(call.in.count, call.out.count);
}

std::size_t part_count(const OpDesc& call, int ranks) {
  if (call.kind == OpKind::all_to_all) return call.in.count / static_cast<std::size_t>(ranks);
  if (parts_of_out(call.kind)) return call.in.count;
  if (parts_of_in(call.kind)) return call.out.count;
  return std::max(call.in.count, call.out.count);
}

std::string signature(OpKind kind, std::size_t count, DType dtype, ReduceOp::Kind reduce, int root) {
  std::string text(name_of(kind));
  if (kind == OpKind::barrier) return text;
  text += " of " + std::to_string(count) + " " + std::string(name_of(dtype));
  if (reduces(kind)) text += " " + std::string(name_of(reduce));
  if (has_root(kind)) text += " root " + std::to_string(root);
  return text;
}

std::string signature(const OpDesc& call, int ranks) {
  if (call.kind == OpKind::all_to_all && !call.in_counts.empty())
    return std::string(name_of(call.kind)) + "_v " + std::string(name_of(call.in.dtype));
  return signature(call.kind, larger_count(call, ranks), call.out.dtype, call.op.kind, call.root);
}

std::string checked_signature(const OpDesc& call, int ranks) {
  std::string text = signature(call, ranks);
  if (!call.label.empty()) text += " (" + std::string(call.label) + ")";
  return text;
}

std::string_view name_of(ReduceOp::Kind kind) { return kReduceNames[static_cast<std::size_t>(kind)]; }
std::string_view name_of(OpKind kind) { return kOpNames[static_cast<std::size_t>(kind)]; }
ReduceOp::Kind parse_reduce_op(std::string_view name) {
  return static_cast<ReduceOp::Kind>(parse_name(name, "reduce op", kReduceNames));
}
OpKind parse_op_kind(std::string_view name) { return static_cast<OpKind>(parse_name(name, "operation", kOpNames)); }

namespace {

Slice part(std::size_t all, std::span<const std::size_t> counts, int parts, int index) {
  if (!counts.empty()) {
    const auto own = counts.begin() + index;
    return {std::accumulate(counts.begin(), own, std::size_t{0}), *own};
  }
  const std::size_t count = all / static_cast<std::size_t>(parts);
  return {count * static_cast<std::size_t>(index), count};
}

}  // namespace

Slice ReadPlan::part_of_in(int rank) const { return part(call_.in.count, call_.in_counts, ranks_, rank); }
Slice ReadPlan::part_of_out(int rank) const { return part(call_.out.count, call_.out_counts, ranks_, rank); }

Slice ReadPlan::given(int reader) const {
  const Slice all{0, call_.in.count};
  switch (call_.kind) {
    case OpKind::all_gather:
      return all;
    case OpKind::gather:
    case OpKind::reduce:
    case OpKind::send:
      return reader == call_.root ? all : Slice{};
    case OpKind::broadcast:
      return rank_ == call_.root ? all : Slice{};
    case OpKind::scatter:
      return rank_ == call_.root ? part_of_in(reader) : Slice{};
    case OpKind::all_reduce:
      return added_by(reader);
    case OpKind::reduce_scatter:
    case OpKind::all_to_all:
      return part_of_in(reader);
    default:
      return {};
  }
}

Slice ReadPlan::taken(int owner) const {
  const Slice all{0, call_.out.count};
  switch (call_.kind) {
    case OpKind::all_gather:
    case OpKind::all_to_all:
      return part_of_out(owner);
    case OpKind::gather:
      return rank_ == call_.root ? part_of_out(owner) : Slice{};
    case OpKind::reduce:
      return rank_ == call_.root ? all : Slice{};
    case OpKind::broadcast:
    case OpKind::scatter:
    case OpKind::recv:
      return owner == call_.root ? all : Slice{};
    case OpKind::all_reduce:
      return added_by(rank_);
    case OpKind::reduce_scatter:
      return all;
    default:
      return {};
  }
}

std::uint64_t ReadPlan::bytes_to(int peer) const {
  if (peer == rank_) return 0;
  return (given(peer).count + (second_round() ? added_by(rank_).count : 0)) * size_of(call_.in.dtype);
}

}  // namespace tessera::comm
