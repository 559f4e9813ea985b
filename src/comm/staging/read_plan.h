// Which rank reads which memory in a call without staging: the `direct` algorithms, with reads in place of sends.
#pragma once

#include "tessera/comm/communicator.h"
#include "tessera/comm/slices.h"

namespace tessera::comm::staging {

/// Whether the data read from several ranks is reduced.
constexpr bool adds_up(OpKind kind) noexcept {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

/// One rank's view of the call. Slices are in elements. A rank's own data is treated like that of the others.
class ReadPlan {
 public:
  ReadPlan(const OpDesc& call, int rank, int ranks) : call_(call), rank_(rank), ranks_(ranks) {}

  /// The slice of this rank's `in` that `reader` reads.
  Slice given(int reader) const;
  /// The slice of this rank's `out` for the data of `owner`; of a reduction, the same for all owners.
  Slice taken(int owner) const;
  /// all_reduce: a second round, in which every rank reads from each owner's `out` the slice that the owner has
  /// reduced.
  bool second_round() const noexcept { return call_.kind == OpKind::all_reduce; }
  Slice added_by(int owner) const { return slice_of(call_.in.count, ranks_, owner); }

 private:
  Slice part_of_in(int rank) const;
  Slice part_of_out(int rank) const;

  const OpDesc& call_;
  const int rank_;
  const int ranks_;
};

}  // namespace tessera::comm::staging
