// One communicator of one rank: its creation, its end, and what its operations call.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "backends/nccl/calls.h"
#include "backends/nccl/registered_memory.h"
#include "backends/nccl/stream_group.h"
#include "tessera/comm/core/split.h"

namespace tessera::comm::nccl {

class NcclGroup final : public StreamGroup {
 public:
  /// `family`: of the group that this one duplicates; else null. Any thread may end it: its device is current then.
  static std::shared_ptr<NcclGroup> create(std::shared_ptr<NcclRuntime> runtime, std::uint64_t id,
                                           std::shared_ptr<Family> family = nullptr);
  /// Creates this group from all ranks of the world. Collective; throws Timeout, BackendError, PeerLost, Aborted.
  void connect(const ncclUniqueId& id);
  /// Returns the part of this group with the same color; null for a negative one. Collective. A part with all members
  /// in their order is a duplicate, which shares resources with this group and fails with it.
  std::shared_ptr<NcclGroup> split(int color, int key, const SplitOptions& options);
  /// Creates a communicator of some members of this one. Collective over them. Throws as connect().
  std::shared_ptr<NcclGroup> create_group(const GroupPlan& plan);
  /// Accepts no more operations and waits for those in flight.
  void close() noexcept;

  /// The next operation runs after the current work of `stream`.
  void come_after(cudaStream_t stream) { stream_->come_after(stream); }
  Work start(const OpDesc& call);
  Work start_batch(std::span<const OpDesc> parts);
  const Capabilities& capabilities() const noexcept { return capabilities_; }

  SymmetricAllocator& symmetric_memory() noexcept { return symmetric_memory_; }
  /// Returns null if NCCL can't register, which is logged, or if the communicator has failed.
  void* register_memory(void* data, std::size_t bytes);
  void deregister_memory(void* handle) noexcept { deregister(api_.ncclCommDeregister, handle); }
  /// Collective. Returns null if NCCL has no windows between the members' devices. Throws BackendError, Timeout, and
  /// the group's failure; NCCL uses `memory` until its call has ended, if that is later.
  void* register_window(const std::shared_ptr<Buffer>& memory, Clock::time_point until);
  void deregister_window(void* window) noexcept { deregister(api_.ncclCommWindowDeregister, window); }

  void on_symmetric_vote(const ControlMessage& message) noexcept override;

 private:
  using StreamGroup::StreamGroup;
  void init(const std::function<ncclUniqueId()>& key, std::chrono::milliseconds timeout);
  ncclUniqueId exchange_key(Clock::time_point until);
  void create_resources();
  std::vector<SplitRequest> gather_requests(SplitRequest mine);
  std::shared_ptr<NcclGroup> make_child(std::uint64_t id, const SplitOptions& options, std::shared_ptr<Family> family);
  std::shared_ptr<NcclGroup> duplicate(std::shared_ptr<NcclGroup> child);
  std::shared_ptr<NcclGroup> create_child(const GroupPlan& plan, std::shared_ptr<NcclGroup> child);
  void deregister(ncclResult_t (*function)(ncclComm_t, void*), void* handle) noexcept;
  NcclOperation& prepare(const OpDesc& call);
  std::string describe_places(const OpDesc& call);
  Work start_split(std::uint64_t number, Issue issue, Issue and_then = {});
  Work start_tree(NcclOperation& op);
  Work start_divided(NcclOperation& op);
  LaunchTarget target(ncclComm_t comm) const;
  void check_device(const OpDesc& call) const;
  void count(const OpDesc& call);

  Capabilities capabilities_;
  std::uint64_t splits_ = 0;
  SymmetricAllocator symmetric_memory_{*this};
  std::map<std::pair<std::uint64_t, int>, std::uint64_t> groups_;  ///< created, by members and tag; guarded by mutex_
};

/// Creates the communicator of all ranks of `bootstrap` over the functions in `api`, which must outlive everything.
/// Collective.
std::unique_ptr<Communicator> make_world(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options,
                                         const NcclApi& api);

}  // namespace tessera::comm::nccl
