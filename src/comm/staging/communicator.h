// The staging communicator, which wraps the inner one.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>

#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/decorator.h"
#include "tessera/comm/staging/ipc_windows.h"
#include "tessera/comm/staging/pipeline.h"

namespace tessera::comm::staging {

class StagedCommunicator final : public Decorator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<StagingPipeline> engine);
  /// Collective over the world: the ranks agree on whether device memory uses windows.
  void negotiate_ipc();
  ~StagedCommunicator() override;

  CompletionPoller& completions() noexcept { return completions_; }

  // Under the engine's lock:
  Work issue(const OpDesc& call) { return Decorator::do_start(call); }
  Buffer acquire_region(std::size_t bytes);
  void release_region(Buffer region);
  /// Whether all calls that must be issued before the part have been issued.
  bool may_issue(StagedTransfer& part);
  void enter(StagedTransfer& part);
  void leave(StagedTransfer& part) noexcept;
  void end_operation() noexcept { in_flight_.fetch_sub(1); }
  /// Null: these ranks don't read each other's memory.
  IpcState* sharing() noexcept { return sharing_ ? &*sharing_ : nullptr; }
  bool aborted() const noexcept { return aborted_.load(); }
  void abort_inner(const std::string& why) noexcept { inner().abort(why); }

 private:
  Work do_start(const OpDesc& call) override;
  Work do_batch(std::span<const OpDesc> parts) override;
  std::unique_ptr<Communicator> do_split(int color, int key, const SplitOptions& options) override;
  std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> child) override;
  Buffer do_allocate(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
  Buffer do_allocate_symmetric(std::size_t bytes, MemoryKind kind, std::optional<MemoryCategory> use) override;
  void do_abort(std::string_view reason) noexcept override;
  void do_after(Stream& stream) override;
  void do_traffic(TrafficStats& snapshot) const override;
  std::string_view do_last_algorithm() const noexcept override;

  Work submit(std::span<const OpDesc> calls, Event after);
  void check_memory(const OpDesc& call) const;
  void wait_until_issued();
  void share_here();
  void close_windows() noexcept;

  const std::shared_ptr<StagingPipeline> engine_;
  std::unique_ptr<Communicator> closing_;  ///< the world's, if it uses windows: its ranks leave together
  std::optional<IpcState> sharing_;
  Event after_;
  /// Calls that must be issued in order: the collectives, and the messages to and from each peer.
  std::map<std::pair<OpKind, int>, std::deque<StagedTransfer*>> lanes_;
  std::multimap<std::size_t, Buffer> regions_;  ///< idle ones, by size
  std::atomic<int> unissued_{0};                ///< parts on lanes
  std::atomic<int> in_flight_{0};               ///< operations
  std::atomic<bool> aborted_{false};
  CompletionPoller completions_;
};

/// Whether the call moves device memory.
bool on_device(const OpDesc& call) noexcept;

}  // namespace tessera::comm::staging
