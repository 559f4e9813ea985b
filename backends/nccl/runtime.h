// What all communicators of one rank share: the device, the control channel, the memory, and a thread that watches.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "backends/nccl/api.h"
#include "backends/nccl/registered_memory.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/control_message.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::nccl {

class NcclGroup;

/// The watching thread sees to deadlines and broken links while the program only lets streams wait.
class NcclRuntime {
 public:
  NcclRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, const NcclApi& api, int device);
  ~NcclRuntime();
  NcclRuntime(const NcclRuntime&) = delete;
  NcclRuntime& operator=(const NcclRuntime&) = delete;
  /// Collective. From here on the ranks hear of each other.
  void open();

  const NcclApi& api() const noexcept { return api_; }
  int device() const noexcept { return device_; }
  int rank() const noexcept { return bootstrap_->rank(); }
  int size() const noexcept { return bootstrap_->size(); }
  const BackendOptions& options() const noexcept { return options_; }
  RegisteredMemory& memory() noexcept { return *memory_; }

  /// `group` must be removed before it goes.
  void add(NcclGroup& group);
  void remove(NcclGroup& group) noexcept;
  /// To the other members of `group`.
  void tell(const NcclGroup& group, const ControlMessage& notice) noexcept;
  /// Which collective each member says that it has called last; nothing for who does not answer in time.
  std::vector<std::optional<std::uint64_t>> ask(const NcclGroup& group) noexcept;

  /// Operations in flight: the watching thread sleeps while there are none.
  void begin_operation() noexcept;
  void end_operations(std::size_t count) noexcept { outstanding_.fetch_sub(static_cast<std::int64_t>(count)); }

 private:
  void hear(int from, std::string_view text) noexcept;  // in the channel's thread, as lost()
  void lost(int rank) noexcept;
  void damaged(int from) noexcept;
  void deliver(int from, const ControlMessage& notice) noexcept;
  void watch() noexcept;

  const std::shared_ptr<Bootstrap> bootstrap_;
  const BackendOptions options_;
  const NcclApi& api_;
  const int device_;
  const std::shared_ptr<RegisteredMemory> memory_;

  /// Shared by who looks (the watching thread may take a while, and the channel's must go on), alone for who changes.
  std::shared_mutex groups_mutex_;
  std::vector<NcclGroup*> groups_;
  std::mutex news_mutex_;                              ///< guards the next three, for those who share the other
  std::set<std::uint64_t> closed_;                     ///< communicators that were here once
  std::vector<std::pair<int, ControlMessage>> early_;  ///< about communicators that this rank has not made yet
  std::vector<bool> dead_;

  std::mutex asking_mutex_;
  std::mutex questions_mutex_;  ///< guards what follows; never held while something else is locked
  std::condition_variable answered_;
  std::map<std::uint64_t, std::shared_ptr<const std::atomic<std::uint64_t>>> called_;  ///< by communicator
  std::uint64_t question_ = 0;
  std::vector<std::optional<std::uint64_t>> answers_;

  std::atomic<std::int64_t> outstanding_{0};
  std::mutex watch_mutex_;
  std::condition_variable watch_;
  bool stop_ = false;
  std::thread watcher_;
  std::unique_ptr<ControlChannel> channel_;
  std::atomic<ControlChannel*> speaks_{nullptr};  ///< the same, when it is there: its thread may be earlier
};

}  // namespace tessera::comm::nccl
