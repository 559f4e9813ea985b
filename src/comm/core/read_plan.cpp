#include "tessera/comm/core/op_traits.h"

#include <numeric>

namespace tessera::comm {
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
