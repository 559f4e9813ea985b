// Which rank gets which data from which: messages, and the `direct` algorithms. A rank that maps its peers' memory
// reads it there.
#pragma once

#include "tessera/comm/communicator.h"
#include "tessera/comm/slices.h"

namespace tessera::comm {

/// One rank's view of the call. Slices are in elements. A rank's own data is treated like that of the others.
class TESSERA_API ReadPlan {
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

  /// What a peer gets of this rank's data in the whole operation or message.
  std::uint64_t bytes_to(int peer) const;

  Slice part_of_in(int rank) const;   ///< of the ranks' parts of this rank's `in`, that of `rank`
  Slice part_of_out(int rank) const;  ///< ... of this rank's `out`

 private:
  const OpDesc& call_;
  const int rank_;
  const int ranks_;
};

}  // namespace tessera::comm
