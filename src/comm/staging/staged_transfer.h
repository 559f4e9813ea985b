// The chunks of a call in flight on a staged communicator.
#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/staging/chunk_plan.h"
#include "tessera/comm/staging/ipc_transfer.h"

namespace tessera::comm::staging {

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
