// State shared by all communicators of one rank over one transport: the transport, the progress engine, the control
// channel.
#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/algorithms.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/control_message.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/host_communicator.h"

namespace tessera::comm::host {

class HostGroup;
class ScheduleExecutor;

/// The state of another rank.
struct Peer {
  bool left = false;  ///< has closed its world normally
  bool died = false;
  bool cut = false;  ///< the transport has lost its connection
  Clock::time_point since;
  std::uint64_t asked_hub = 0;  ///< number of the probe sent to rank 0 when it was cut
  std::string why;              ///< why it is cut, or the first failure that it sent when it left
};

/// The world rank that forwards messages of the control channel.
inline constexpr int kHub = 0;

/// Time within which, after a transport failure, the control channel reports whether a dead rank caused it.
inline constexpr std::chrono::milliseconds kVerdictTime{500};

class HostRuntime final : public Pollable, public TransportEvents {
 public:
  /// `native`: the operations that the transport's library may implement as a whole.
  HostRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, std::string name,
              std::span<const OpKind> native);
  ~HostRuntime() override;
  HostRuntime(const HostRuntime&) = delete;
  HostRuntime& operator=(const HostRuntime&) = delete;
  void connect(const TransportFactory& make_transport);
  /// No more operations follow: announces this to the other ranks and closes the connections.
  void leave() noexcept;

  int rank() const noexcept { return bootstrap_->rank(); }
  int size() const noexcept { return bootstrap_->size(); }
  ProgressEngine& engine() noexcept { return *engine_; }
  Transport& transport() noexcept { return *transport_; }
  const BackendOptions& options() const noexcept { return options_; }
  const Capabilities& capabilities() const noexcept { return capabilities_; }
  const AlgorithmTable& algorithms() const noexcept { return algorithms_; }
  MemoryPool& memory() noexcept { return memory_; }
  MemoryPool& unbooked_memory() noexcept { return unbooked_memory_; }
  const Peer& peer(int world_rank) const { return peers_[static_cast<std::size_t>(world_rank)]; }

  /// The first communicator number from `from` on that is unused on this rank.
  std::uint32_t free_number(std::uint32_t from);
  /// False: meanwhile in use.
  bool reserve(std::uint32_t number);
  void give_back(std::uint32_t number);

  // Under the engine's lock:
  void add(HostGroup& group);
  void remove(HostGroup& group);
  void make_runnable(ScheduleExecutor& op) noexcept;
  void forget(ScheduleExecutor& op) noexcept;  ///< it has ended
  bool poll(bool with_health_check) noexcept override;
  void connection_lost(int peer, const std::string& why) noexcept override;
  void message_damaged(int peer, const std::string& what) noexcept override;
  void transport_failed(const std::string& why) noexcept override;
  void tell(int world_rank, const ControlMessage& notice) noexcept;
  /// Handles the control messages received since the last call; any thread that holds the lock.
  void hear() noexcept;

  /// Whether this rank would have been informed by now if `peer` had closed normally.
  bool would_have_heard(const Peer& peer) const;
  std::string name_hub(const HostGroup& group) const;

  /// Keeps polling while the transport needs it after messages were cancelled, even without operations in flight.
  void update_transport_polling() noexcept;

  /// When the transport last moved something, with the resolution of the with_health_check polls.
  Clock::time_point last_moved() const noexcept { return last_moved_; }
  /// Whether control messages wait to be handled; any thread.
  bool has_heard() const noexcept { return heard_.load(); }

  /// Asks all ranks for their last operation called on `communicator`; empty for a rank that doesn't answer in time.
  /// May be called under the engine's lock.
  std::vector<std::optional<std::uint64_t>> ask(const HostGroup& group) noexcept;

 private:
  void receive(ControlMessage notice) noexcept;  // on the control thread
  void handle(const ControlMessage& notice) noexcept;
  bool run_ready() noexcept;
  void blame_transport() noexcept;

  std::shared_ptr<Bootstrap> bootstrap_;
  const BackendOptions options_;
  const Capabilities capabilities_;
  const AlgorithmTable algorithms_;
  MemoryPool memory_;
  MemoryPool unbooked_memory_;
  Doorbell bell_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ProgressEngine> engine_;
  std::unique_ptr<ControlChannel> channel_;
  std::atomic<ControlChannel*> voice_{nullptr};  ///< the same, for threads that send
  bool left_ = false;
  bool polls_for_transport_ = false;
  std::string transport_failure_;          ///< not reported yet
  Clock::time_point transport_blamed_at_;  ///< when it will be reported

  std::mutex numbers_mutex_;
  std::vector<bool> taken_;

  // Under the engine's lock:
  std::vector<HostGroup*> groups_;
  std::vector<ScheduleExecutor*> runnable_;
  std::vector<Peer> peers_;
  bool stirred_ = false;
  Clock::time_point last_moved_;
  std::vector<ControlMessage> early_;  ///< about communicators that this rank has not created yet

  std::mutex inbox_mutex_;
  std::vector<ControlMessage> inbox_;
  std::atomic<bool> heard_{false};
  std::mutex questions_mutex_;  ///< guards what the control thread answers by itself
  std::condition_variable answered_;
  std::map<std::uint64_t, std::shared_ptr<std::atomic<std::uint64_t>>> called_;  ///< by communicator
  std::uint64_t question_ = 0;
  std::uint64_t asked_hub_ = 0;  ///< number of probes sent to rank 0
  std::atomic<std::uint64_t> heard_from_hub_{0};
  std::vector<std::optional<std::uint64_t>> answers_;
};

}  // namespace tessera::comm::host
