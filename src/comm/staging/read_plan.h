// Who reads what of whose memory in a call that needs no staging: the `direct` algorithms, by reading instead of
// sending.
#pragma once

#include <cstddef>

#include "tessera/comm/communicator.h"
#include "tessera/comm/slices.h"

namespace tessera::comm::staging {

/// What is read of several ranks becomes one.
constexpr bool adds_up(OpKind kind) noexcept {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

/// As one rank sees the call. Slices are in elements. What is its own counts like everybody else's.
class ReadPlan {
 public:
  ReadPlan(const OpDesc& call, int rank, int ranks) : call_(call), rank_(rank), ranks_(ranks) {}

  /// Of this rank's `in`, what `reader` reads.
  Slice given(int reader) const;
  /// Where in this rank's `out` it goes what `owner` gives; of a sum, all of it to one place.
  Slice taken(int owner) const;
  /// all_reduce: then everybody reads, from everybody's `out`, the slice that its owner has added up.
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
