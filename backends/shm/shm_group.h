// One communicator of one rank over shared memory: the order of its operations, and when they fail.
//
// Collectives of a communicator run one after another in call order, which is the same on all ranks. Messages between
// two ranks run beside them, in an order of their own for each pair and direction. Everything below poll() runs under
// the progress engine's lock.
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "backends/shm/collective_buffers.h"
#include "backends/shm/member_blocks.h"
#include "backends/shm/operation.h"
#include "backends/shm/point_to_point.h"
#include "backends/shm/tiled_collective.h"
#include "tessera/comm/core/polled_group.h"

namespace tessera::comm::shm {

class ShmGroup final : public PolledGroup {
 public:
  /// Allocates this rank's control block. The caller then sends its offsets to the other members and calls connect().
  ShmGroup(std::shared_ptr<ShmRuntime> runtime, int rank, std::vector<int> members,
           std::shared_ptr<MemoryTracker> memory_tracker);
  ~ShmGroup() override;
  MemberBlocks::Offsets own_offsets() const { return blocks_.own_offsets(); }
  void connect(std::span<const MemberBlocks::Offsets> offsets) { blocks_.connect(offsets); }
  /// Accepts no more operations and waits for those in flight.
  void close() noexcept { finish_operations(); }

  /// The operation of a call, for launch(). `internal`: of the library itself.
  ShmOperation& prepare(const OpDesc& call, bool internal);
  Work start(const OpDesc& call) { return launch(prepare(call, false)); }
  Work start_batch(std::span<const OpDesc> parts, bool internal = false);
  /// Memory that the members read without a copy.
  Buffer allocate_scratch(std::size_t bytes) const;
  void read_traffic(TrafficStats& stats) const override;
  std::string_view last_algorithm() const noexcept { return last_algorithm_; }
  ShmRuntime& runtime() const noexcept { return *runtime_; }
  const Capabilities& capabilities() const noexcept { return runtime_->capabilities(); }
  const std::shared_ptr<ShmRuntime>& shared_runtime() const noexcept { return runtime_; }

  /// Does a bounded amount of work. True if anything progressed.
  bool poll(bool with_health_check) noexcept;
  using PolledGroup::complete;
  /// Fails as a peer has failed. False: none has.
  bool adopt_peer_failure() noexcept;

 private:
  static constexpr std::string_view kDirect = "direct";
  static constexpr std::string_view kSymmetric = "symmetric";

  ShmOperation& prepare_message(const OpDesc& call, bool internal);
  bool uses_symmetric(const OpDesc& call) const;
  void select_protocol(ShmOperation& op) const;

  bool accept_submitted() noexcept;
  bool advance_first();
  bool advance_collective(ShmOperation& op);
  void run_eager(const ShmOperation& op);
  void send_failure(const Failure& failure) noexcept override;
  void fail_operations(bool first) noexcept override;
  bool check_health() noexcept;
  void look_for_failure() noexcept;
  void check_peers(const ShmOperation& op) noexcept;
  void fail_with_timeout(const ShmOperation& op) noexcept;

  const std::shared_ptr<ShmRuntime> runtime_;
  std::string_view last_algorithm_ = kDirect;  ///< of the last call
  std::uint64_t sequence_ = 0;
  MemberBlocks blocks_;
  CollectiveBuffers buffers_;
  Announcements announcements_;
  OperationQueue<ShmOperation> collectives_;
  TiledCollective tiled_;
  PointToPoint messages_;
  SharedPeerMonitor monitor_;
  std::vector<const void*> sources_;  ///< of run_eager(), by member
  std::vector<double> factors_;       ///< likewise, of premul_sum
};

}  // namespace tessera::comm::shm
