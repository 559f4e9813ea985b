// The state that all communicators of one rank share: device, control channel, memory, and a watching thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "backends/nccl/api.h"
#include "backends/nccl/call_threads.h"
#include "backends/nccl/operation.h"
#include "backends/nccl/registered_memory.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/control_peer_monitor.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::nccl {

class StreamGroup;

/// What a rank uses. `no_windows`: why the ranks have no symmetric windows, the same on all; "" if they have.
/// `copy_engines`: whether communicators for gathers use them, the same on all.
struct RankDevice {
  int index = 0;
  std::string no_windows;
  bool copy_engines = false;
};

/// The watching thread checks deadlines and broken connections while the program only makes streams wait.
class NcclRuntime {
 public:
  NcclRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, const NcclApi& api,
              RankDevice device);
  ~NcclRuntime();
  /// Collective. From here on the ranks exchange control messages.
  void open();

  const NcclApi& api() const noexcept { return api_; }
  int device() const noexcept { return device_.index; }
  const std::string& no_windows() const noexcept { return device_.no_windows; }
  bool copy_engines() const noexcept { return device_.copy_engines; }
  /// Logs once, on rank 0, why memory is not symmetric.
  void report_no_windows(const std::string& why) noexcept;
  int rank() const noexcept { return bootstrap_->rank(); }
  int size() const noexcept { return bootstrap_->size(); }
  const BackendOptions& options() const noexcept { return options_; }
  RegisteredMemory& memory() noexcept { return *memory_; }
  ControlPeerMonitor& monitor() noexcept { return monitor_; }
  CallThreads& calls() noexcept { return calls_; }
  AbandonedStreams& abandoned() noexcept { return *abandoned_; }

  /// `group` must be removed before it is destroyed.
  void add(StreamGroup& group);
  void remove(StreamGroup& group) noexcept;

  /// Operations in flight: the watching thread sleeps while there are none.
  void begin_operation() noexcept;
  void end_operations(std::size_t count) noexcept { outstanding_.fetch_sub(static_cast<std::int64_t>(count)); }

 private:
  void receive(const ControlMessage& message) noexcept;  // runs in the channel's thread
  void deliver(const ControlMessage& message) noexcept;
  void watch() noexcept;

  const std::shared_ptr<Bootstrap> bootstrap_;
  const BackendOptions options_;
  const NcclApi& api_;
  const RankDevice device_;
  std::atomic<bool> reported_no_windows_{false};
  const std::shared_ptr<AbandonedStreams> abandoned_;
  const std::shared_ptr<RegisteredMemory> memory_;

  /// Shared for readers (the watching thread may take a while, and the channel's must continue), exclusive for changes.
  std::shared_mutex groups_mutex_;
  std::vector<StreamGroup*> groups_;
  std::mutex news_mutex_;              ///< guards the next three, for holders of the shared lock
  std::set<std::uint64_t> closed_;     ///< communicators that existed once
  std::vector<ControlMessage> early_;  ///< about communicators that this rank has not created yet
  std::vector<bool> dead_;

  std::atomic<std::int64_t> outstanding_{0};
  std::mutex watch_mutex_;
  std::condition_variable watch_;
  bool stop_ = false;
  std::thread watcher_;
  CallThreads calls_;
  ControlPeerMonitor monitor_;
};

}  // namespace tessera::comm::nccl
