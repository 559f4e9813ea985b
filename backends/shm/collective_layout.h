// The layout of every collective: which rank reads what from which rank.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/slices.h"

namespace tessera::comm::shm {

/// One rank's view of one call, in elements.
class CollectiveLayout {
 public:
  CollectiveLayout(int rank, int ranks) : rank_(rank), ranks_(ranks) {}
  /// `all_inputs`: an all_reduce in which every rank reads all inputs.
  void reset(const OpDesc& call, bool all_inputs);

  int rank() const noexcept { return rank_; }
  int ranks() const noexcept { return ranks_; }
  bool symmetric() const noexcept { return symmetric_; }
  bool shares_input() const;                             ///< all readers read the same part of this rank's input
  bool reduces() const { return comm::reduces(kind_); }  ///< readers combine the sources; else they copy them
  Slice read_slice(int source) const;                    ///< what this rank reads from the input of `source`
  Slice sent_slice(int reader) const;                    ///< what `reader` reads of this rank's input
  std::size_t output_offset(int source) const;           ///< where the data of `source` goes in this rank's output
  Slice owned_slice(int owner) const;                    ///< all_reduce: what `owner` computes
  bool second_half() const { return kind_ == OpKind::all_reduce && !symmetric_; }
  /// Bytes that decide between the eager and the tiled algorithm; the same on all ranks. None: always tiled.
  std::size_t eager_size() const;
  bool sends_input() const;  ///< peers read this rank's input
  bool ragged() const { return !in_starts_.empty() || !out_starts_.empty(); }
  std::uint64_t fingerprint(const ReduceOp& op) const;  ///< what must be equal on all ranks
  std::uint64_t table_count() const;                    ///< elements in the table of a mismatch

 private:
  const int rank_;
  const int ranks_;
  OpKind kind_ = OpKind::barrier;
  DType dtype_ = DType::f32;
  int root_ = 0;
  std::size_t in_count_ = 0;
  std::size_t out_count_ = 0;
  std::vector<std::size_t> in_starts_;  ///< the _v forms: ranks + 1 offsets
  std::vector<std::size_t> out_starts_;
  bool symmetric_ = false;
};

}  // namespace tessera::comm::shm
