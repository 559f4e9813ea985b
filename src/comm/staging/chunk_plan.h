// How a call is divided into chunks, and where a chunk's elements lie in the caller's memory and in host memory.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/comm/staging.h"

namespace tessera::comm::staging {

/// Bytes copied between the caller's memory and a region of host memory.
struct CopySegment {
  std::size_t device = 0;  ///< offset in the caller's view
  std::size_t host = 0;    ///< offset in the region
  std::size_t bytes = 0;
};

/// One chunk as a separate call. If the caller's buffers may be the same, the region's are the same, which halves its
/// memory.
struct Chunk {
  std::vector<CopySegment> down;  ///< of the caller's `in`
  std::vector<CopySegment> up;    ///< to the caller's `out`
  std::vector<std::size_t> in_counts;
  std::vector<std::size_t> out_counts;
  std::size_t in_at = 0;  ///< offsets in the region
  std::size_t out_at = 0;
  std::size_t in_count = 0;  ///< elements
  std::size_t out_count = 0;
  std::size_t bytes = 0;  ///< size of the region
};

/// Elements are reduced one by one, so chunking doesn't affect the result. Chunks are multiples of the number of ranks,
/// so the ranks' slices, and the bytes between each pair of ranks, are those of the whole call.
class ChunkPlan {
 public:
  ChunkPlan(const OpDesc& call, int rank, int ranks, std::size_t chunk_bytes);
  std::size_t chunks() const noexcept { return chunks_; }
  Chunk chunk(std::size_t index) const;
  /// The size of the largest chunk's region.
  std::size_t region_bytes() const { return chunk(0).bytes; }

 private:
  /// A buffer of the call: its parts are consecutive, and a chunk contains the same amount of each.
  struct BufferSide {
    std::vector<std::size_t> counts;
    bool ragged = false;  ///< the call specifies the counts
    bool here = false;    ///< this rank uses the buffer
  };
  BufferSide side(const ConstView& view, std::span<const std::size_t> counts, bool parted) const;
  void append_segments(const BufferSide& side, std::size_t from, std::size_t at,
                       std::vector<CopySegment>& segments) const;
  std::size_t taken(const BufferSide& side, std::size_t from) const;
  std::vector<std::size_t> counts_of(const BufferSide& side, std::size_t from) const;

  OpKind kind_;
  std::size_t size_;
  std::size_t rank_;
  std::size_t ranks_;
  BufferSide in_;
  BufferSide out_;
  std::size_t step_ = 0;  ///< elements of each part in one chunk
  std::size_t chunks_ = 1;
};

}  // namespace tessera::comm::staging
