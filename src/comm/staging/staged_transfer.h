// The chunks of a call in flight on a staged communicator: how a call is divided into them, and where a chunk's
// elements lie in the caller's memory and in host memory.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/staging.h"
#include "tessera/comm/staging/ipc_transfer.h"

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

class StagedOperation;

/// One chunk in flight.
struct ChunkInFlight {
  enum class Stage : std::uint8_t { down, moving, up };
  Stage stage = Stage::down;
  std::size_t index = 0;
  Chunk chunk;
  std::byte* region = nullptr;
  Event event;  ///< of the copies
  Work work;
};

/// A call, or a part of a batch. If the ranks can't read each other's memory, its chunks are copied to the host, moved
/// between the ranks, and copied back, each in order.
class StagedTransfer {
 public:
  StagedTransfer(StagedOperation& operation, const OpDesc& call, bool staged);
  StagedTransfer(const StagedTransfer&) = delete;
  StagedTransfer& operator=(const StagedTransfer&) = delete;

  /// Acquires regions for up to this many more chunks (at most all remaining ones).
  void widen(std::size_t chunks);
  /// Progresses as far as possible. `may_issue`: earlier calls on its lane have been issued.
  bool advance(bool may_issue);
  /// After a failure: true once nothing of it is in flight.
  bool drained();
  void release_regions();

  bool issued() const noexcept { return shared_ ? shared_->all_sent() : issued_ == chunks_; }
  bool done() const noexcept { return shared_ ? shared_->done() : landed_ == chunks_; }
  bool moving() const noexcept;  ///< whether the inner communicator has a chunk
  const OpDesc& call() const noexcept { return call_; }

 private:
  bool begin_chunk();
  bool issue_next();
  bool land();
  void copy_down(ChunkInFlight& flight);
  void issue(ChunkInFlight& flight);
  bool land_first(ChunkInFlight& flight);

  StagedOperation& operation_;
  OpDesc call_;
  std::vector<std::size_t> in_counts_;
  std::vector<std::size_t> out_counts_;
  std::optional<IpcTransfer> shared_;  ///< empty: staged, or host memory
  std::optional<ChunkPlan> plan_;      ///< empty: host memory, passed on unchanged
  std::size_t chunks_ = 1;
  std::size_t begun_ = 0;
  std::size_t issued_ = 0;
  std::size_t landed_ = 0;
  std::deque<ChunkInFlight> flights_;
  std::vector<Buffer> regions_;
  std::vector<std::byte*> idle_;
};

}  // namespace tessera::comm::staging
