// One communicator of one rank: the NCCL communicator, its stream, and the operations in flight.
//
// All operations of a communicator run on one stream of its own, in call order. NCCL communicators are non-blocking: a
// call may still be in progress when it returns, and no other call is allowed meanwhile. So each call here waits until
// NCCL has enqueued it, which needs no peer, except when connections are made for the first time. All such waits end at
// the operation's deadline.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/nccl/calls.h"
#include "backends/nccl/comm_aborter.h"
#include "backends/nccl/cuda_objects.h"
#include "backends/nccl/operation.h"
#include "backends/nccl/runtime.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

class NcclGroup final : public std::enable_shared_from_this<NcclGroup> {
 public:
  NcclGroup(std::shared_ptr<NcclRuntime> world, std::uint64_t id, CommunicatorOptions options);
  ~NcclGroup();
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  /// Creates this group from all ranks of the world. Collective; throws Timeout, BackendError, PeerLost, Aborted.
  void connect(const ncclUniqueId& id);
  /// Returns the part of this group with the same color; null for a negative one. Collective.
  std::shared_ptr<NcclGroup> split(int color, int key);
  /// Accepts no more operations and waits for those in flight.
  void close() noexcept;

  /// The next operation runs after the current work of `stream`.
  void come_after(cudaStream_t stream);
  Work start(const OpDesc& call);
  Work start_batch(std::span<const OpDesc> parts);
  void abort(std::string_view reason) noexcept;
  void read_traffic(TrafficStats& snapshot) const;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(members_.size()); }
  std::uint64_t id() const noexcept { return id_; }
  const std::vector<int>& members() const noexcept { return members_; }  ///< world ranks
  const Capabilities& capabilities() const noexcept { return capabilities_; }
  NcclRuntime& world() const noexcept { return *world_; }
  const std::shared_ptr<NcclRuntime>& shared_world() const noexcept { return world_; }
  /// The number of the last operation that all members call.
  std::shared_ptr<const std::atomic<std::uint64_t>> called() const noexcept { return called_; }

  /// Returns null if NCCL can't register, which is logged, or if the communicator has failed.
  void* register_memory(void* data, std::size_t bytes);
  void deregister_memory(void* handle) noexcept;

  // failure.cpp; any thread:
  /// Removes completed operations; fails if NCCL has failed.
  void retire_completed() noexcept;
  /// Does the same and checks deadlines.
  void check_health() noexcept;
  void time_out(const NcclOperation& op) noexcept;
  /// The first cause wins. Returns at once: a separate thread aborts the NCCL communicator.
  void fail(Failure failure, bool tell) noexcept;
  void lose(int world_rank) noexcept;
  void hear_closing(int world_rank, std::uint64_t called) noexcept;
  void hear_call(int world_rank, std::uint64_t sequence, const std::string& signature) noexcept;
  /// Throws the failure. `op`: first waits, bounded, until the device can no longer write its memory.
  [[noreturn]] void throw_failure(const NcclOperation* op = nullptr);
  /// Deadline for waits on the device of a failed communicator: once it has passed, no caller waits again.
  Clock::time_point stop_deadline() const noexcept;
  void put_back(NcclOperation& op) noexcept;

 private:
  enum class Health : std::uint8_t { well, suspicious, broken };
  /// Checked mode: the signatures that the members call.
  struct Agreement {
    std::vector<std::string> signatures;
    std::size_t here = 0;
    bool reached = false;
  };

  /// Calls `issue` and waits until NCCL has enqueued it; then does the same with `and_then`, if present.
  Work launch(NcclOperation::OpInfo what, const std::function<ncclResult_t()>& issue,
              const std::function<ncclResult_t()>& and_then = {});
  void issue_locked(const std::function<ncclResult_t()>& issue);
  void take_in(NcclOperation& op, bool all);
  Work start_tree(const OpDesc& call);
  void* workspace(std::size_t bytes);
  void wait_ready(Clock::time_point until);
  void settle_in();
  std::vector<int> gather_world_ranks();
  NcclOperation& acquire();
  LaunchTarget target() const;
  void count(const OpDesc& call);
  void check_device(const OpDesc& call) const;
  NcclOperation::OpInfo describe_call(const OpDesc& call);

  // failure.cpp
  /// ncclInProgress, success, or the error of NCCL's threads.
  ncclResult_t state_locked() const noexcept;
  void take_through_locked(std::vector<NcclOperation*>& through, Failure& trouble) noexcept;
  Health health_locked(Failure& failure) noexcept;
  bool somebody_left_locked(Failure& failure) const;
  void announce(const NcclOperation::OpInfo& what);
  bool agreed_locked(const NcclOperation& op) const;
  std::string rank_name(int member) const;
  std::string vendor_text_locked(const NcclError& error) const;
  int member_of(int world_rank) const noexcept;
  void release_operations(std::span<NcclOperation* const> through) noexcept;

  const std::shared_ptr<NcclRuntime> world_;
  const NcclApi& api_;
  const std::uint64_t id_;
  const CommunicatorOptions options_;
  int rank_ = 0;
  std::vector<int> members_;
  Capabilities capabilities_;
  const std::shared_ptr<std::atomic<std::uint64_t>> called_ = std::make_shared<std::atomic<std::uint64_t>>(0);
  std::uint64_t splits_ = 0;
  std::unique_ptr<PinnedScratch> scratch_;                ///< outlives the stream, as do ...
  std::vector<std::unique_ptr<DeviceBlock>> workspaces_;  ///< ... these: the last is used, operations may use others
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaEvent> before_;  ///< the next operation runs after it, if ...
  bool comes_after_ = false;

  mutable std::mutex mutex_;  ///< guards what follows, and every use of comm_
  ncclComm_t comm_ = nullptr;
  Failure failure_;
  std::deque<NcclOperation*> in_flight_;           ///< in the order of the stream
  std::map<std::uint64_t, Agreement> agreements_;  ///< by sequence
  std::vector<std::unique_ptr<NcclOperation>> all_ops_;
  std::vector<NcclOperation*> free_ops_;
  std::vector<std::vector<std::uint64_t>> bytes_;      ///< sent, by kind and member
  std::vector<std::optional<std::uint64_t>> closed_;   ///< by member: what it had called when it closed
  std::optional<Clock::time_point> suspicious_since_;  ///< NCCL reports an error that a dead peer may cause
  std::shared_ptr<CommAborter> stopper_;
  std::atomic<bool> failed_{false};
  std::atomic<bool> does_not_stop_{false};
  std::mutex time_out_mutex_;
};

}  // namespace tessera::comm::nccl
