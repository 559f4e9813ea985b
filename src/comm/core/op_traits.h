// What the kinds of operations have in common, the names of operations in errors, logs and the table of a mismatch, and
// which rank gets which data from which.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/slices.h"

namespace tessera::comm {

/// Moves data between two ranks.
constexpr bool is_message(OpKind kind) noexcept { return kind == OpKind::send || kind == OpKind::recv; }

/// Reduces the data of several ranks.
constexpr bool reduces(OpKind kind) noexcept {
  return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter || kind == OpKind::reduce;
}

/// Only the root's `in` is read.
constexpr bool reads_root(OpKind kind) noexcept { return kind == OpKind::broadcast || kind == OpKind::scatter; }

/// Only the root's `out` is written.
constexpr bool writes_root(OpKind kind) noexcept { return kind == OpKind::reduce || kind == OpKind::gather; }

/// Treats one rank unlike the others.
constexpr bool has_root(OpKind kind) noexcept { return reads_root(kind) || writes_root(kind); }

/// `in` consists of a part for each rank.
constexpr bool parts_of_in(OpKind kind) noexcept {
  return kind == OpKind::reduce_scatter || kind == OpKind::scatter || kind == OpKind::all_to_all;
}

/// `out` consists of a part from each rank.
constexpr bool parts_of_out(OpKind kind) noexcept {
  return kind == OpKind::all_gather || kind == OpKind::gather || kind == OpKind::all_to_all;
}

/// "all_reduce #12 (layer.3)", "recv from rank 2 #1"; number 0 is omitted.
TESSERA_API std::string describe(const OpDesc& call, std::uint64_t sequence);

/// "rank 1"; "rank 1 (3 of the job)" if a rank of a communicator has another number in the job.
TESSERA_API std::string describe_rank(int rank, int global_rank);

/// "rank 1 has closed its communicator", and the reason if it sent `first_failure_cause`.
TESSERA_API std::string describe_leaving(const std::string& rank, const std::string& first_failure_cause);

/// Elements of the larger of the two buffers on a rank that uses both; the same on every rank, except for all_to_all_v,
/// for which it is 0.
TESSERA_API std::size_t larger_count(const OpDesc& call, int ranks);

/// Elements of one rank's part if all parts are equal, or of the whole operation if it has no parts; the same on every
/// rank.
TESSERA_API std::size_t part_count(const OpDesc& call, int ranks);

/// "all_reduce of 12 f32 sum", "broadcast of 12 f32 root 3": what must be equal on all ranks.
TESSERA_API std::string signature(const OpDesc& call, int ranks);
/// The same for `count` elements, unless the lengths of the parts differ.
std::string signature(OpKind kind, std::size_t count, DType dtype, ReduceOp::Kind reduce, int root);
/// The same with the label, "all_gather of 12 f32 (layer.3)": what checked mode compares.
TESSERA_API std::string checked_signature(const OpDesc& call, int ranks);

/// Which rank gets which data from which: messages, and the `direct` algorithms. A rank that maps its peers' memory
/// reads it there. This is one rank's view of the call. Slices are in elements. A rank's own data is treated like that
/// of the others.
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
