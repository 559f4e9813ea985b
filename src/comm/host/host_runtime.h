// State shared by all communicators of one rank over one transport: the transport, the progress engine, the control
// channel.
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/algorithms.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/control_peer_monitor.h"
#include "tessera/comm/core/progress.h"
#include "tessera/comm/core/split.h"
#include "tessera/comm/host_communicator.h"

namespace tessera::comm::host {

class HostGroup;
class ScheduleExecutor;

/// The state of another rank.
struct PeerStatus {
  bool left = false;  ///< has closed its world normally
  bool died = false;
  bool disconnected = false;  ///< the transport has lost its connection
  Clock::time_point since;
  std::uint64_t probe = 0;  ///< number of the one sent, when it was disconnected, to the rank that forwards for it
  std::string why;          ///< why it is disconnected, or the first failure that it sent when it left
};

/// Time within which, after a transport failure, the control channel reports whether a dead rank caused it.
inline constexpr std::chrono::milliseconds kVerdictTime{500};

class HostRuntime final : public Pollable, public TransportEvents {
 public:
  /// `native`: the operations that the transport's library may implement as a whole.
  HostRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, std::string name,
              std::span<const OpKind> native);
  ~HostRuntime() override;
  void connect(const TransportFactory& make_transport);
  /// No more operations follow: reports this to the other ranks and closes the connections.
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
  /// A communicator has failed at a deadline.
  void on_timeout() noexcept { timed_out_ = true; }
  const PeerStatus& peer(int world_rank) const { return peers_[static_cast<std::size_t>(world_rank)]; }

  CommunicatorIds& ids() noexcept { return ids_; }
  ControlPeerMonitor& monitor() noexcept { return monitor_; }

  // Under the engine's lock:
  void add(HostGroup& group);
  void remove(HostGroup& group);
  void make_runnable(ScheduleExecutor& op) noexcept;
  void remove_runnable(ScheduleExecutor& op) noexcept;
  bool poll(bool with_health_check) noexcept override;
  void connection_lost(int peer, const std::string& why) noexcept override;
  void message_damaged(int peer, const std::string& what, bool authenticated) noexcept override;
  void transport_failed(const std::string& why) noexcept override;
  void process_exits() noexcept override;
  /// Handles the control messages received since the last call; any thread that holds the lock.
  void handle_messages() noexcept;

  /// Whether this rank would know by now if a rank of the world had closed normally.
  bool would_know_departure(int world_rank) const;
  /// Names a rank of the world that forwards for others and did not reply.
  std::string describe_forwarder(int world_rank, const HostGroup& group) const;

  /// Keeps polling while the transport needs it after messages were cancelled, even without operations in flight.
  void update_transport_polling() noexcept;

  /// When the transport last moved something, with the resolution of the with_health_check polls.
  Clock::time_point last_moved() const noexcept { return last_moved_; }
  /// Whether control messages wait to be handled; any thread.
  bool has_messages() const noexcept { return any_received_.load(); }

 private:
  void receive(ControlMessage message) noexcept;  // on the control thread
  void handle(const ControlMessage& message) noexcept;
  bool run_ready() noexcept;
  void report_transport_failure() noexcept;

  std::shared_ptr<Bootstrap> bootstrap_;
  const BackendOptions options_;
  Capabilities capabilities_;
  const AlgorithmTable algorithms_;
  MemoryPool memory_;
  MemoryPool unbooked_memory_;
  Doorbell bell_;
  std::unique_ptr<Transport> transport_;
  std::unique_ptr<ProgressEngine> engine_;
  ControlPeerMonitor monitor_;
  CommunicatorIds ids_{kMaxCommunicators};
  bool open_ = false;                   ///< until leave()
  std::atomic<bool> timed_out_{false};  ///< an operation of any communicator, on any rank
  bool polls_for_transport_ = false;
  std::string transport_failure_;          ///< not reported yet
  Clock::time_point transport_blamed_at_;  ///< when it will be reported

  // Under the engine's lock:
  std::vector<HostGroup*> groups_;
  std::vector<ScheduleExecutor*> runnable_;
  std::vector<PeerStatus> peers_;
  bool stirred_ = false;
  Clock::time_point last_moved_;
  std::vector<ControlMessage> early_;  ///< about communicators that this rank has not created yet

  std::mutex received_mutex_;
  std::vector<ControlMessage> received_;
  std::atomic<bool> any_received_{false};
};

}  // namespace tessera::comm::host
