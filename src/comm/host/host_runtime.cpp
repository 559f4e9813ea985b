#include "tessera/comm/host/host_runtime.h"

#include <algorithm>

#include "tessera/base/cores.h"
#include "tessera/base/error.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/host/host_group.h"
#include "tessera/comm/schedule.h"

namespace tessera::comm::host {
namespace {

constexpr std::size_t kComputeBytes = std::size_t{4} << 20;  ///< copied and reduced in one poll of one operation
constexpr std::size_t kMaxEarly = 1024;

/// Deterministic mode requires the tree's order, which such libraries don't keep.
std::vector<std::string> algorithms_of(bool deterministic, std::span<const OpKind> native) {
  std::vector<std::string> names = known_algorithms(deterministic);
  if (deterministic) return names;
  for (const OpKind kind : native) names.push_back(std::string(name_of(kind)).append("=").append(kNativeAlgorithm));
  return names;
}

Capabilities make_capabilities(const std::string& name, bool deterministic, int ranks, std::span<const OpKind> native) {
  Capabilities all;
  all.backend = name;
  all.dtypes.assign(kDTypes.begin(), kDTypes.end());
  all.memory = {MemoryKind::host};
  all.message_tags = true;
  all.deterministic = deterministic;
  all.algorithms = algorithms_of(deterministic, native);
  if (!deterministic) all.rounding_ulps = 0.5 * std::max(1, ranks - 1);  // a ring rounds at every step
  if (!deterministic && !native.empty())
    all.rounding_ulps += 0.5;  // premul_sum before the first, or avg after the last
  return all;
}

AlgorithmTable make_table(const BackendOptions& options, std::span<const OpKind> native) {
  try {
    return {options.algorithms, algorithms_of(options.deterministic, native)};
  } catch (const InvalidUsage&) {
    if (!options.deterministic) throw;
    [[maybe_unused]] const AlgorithmTable exists(options.algorithms, algorithms_of(false, native));
    throw InvalidUsage("TESSERA_ALGO: '" + options.algorithms +
                       "' names an algorithm that does not reduce along the tree; it needs TESSERA_DETERMINISTIC=0");
  }
}

}  // namespace

HostRuntime::HostRuntime(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options, std::string name,
                         std::span<const OpKind> native)
    : bootstrap_(std::move(bootstrap)),
      options_(options),
      capabilities_(make_capabilities(name, options.deterministic, bootstrap_->size(), native)),
      algorithms_(make_table(options, native)),
      memory_(options.communicator.memory_tracker),
      unbooked_memory_(std::make_shared<MemoryTracker>()),
      monitor_(*bootstrap_),
      peers_(static_cast<std::size_t>(size())) {}

void HostRuntime::connect(const TransportFactory& make_transport) {
  transport_ = make_transport(*bootstrap_, *this, options_);
  capabilities_.any_source = transport_->knows_arrivals();
  const auto& hosts = bootstrap_->hosts();
  const auto here = std::ranges::count(hosts, hosts[static_cast<std::size_t>(rank())]);
  const auto cores = host_cores();
  engine_ = std::make_unique<ProgressEngine>(bell_, ProgressOptions{.thread = options_.progress_thread && size() > 1,
                                                                    .oversubscribed = here > cores,
                                                                    .waiter = &transport_->waiter()});
  engine_->add(*this);
  monitor_.open(capabilities_.backend, [this](ControlMessage message) { receive(std::move(message)); });
  open_ = true;
}

void HostRuntime::leave() noexcept {
  if (!std::exchange(open_, false)) return;
  const bool silent = timed_out_ && !monitor_.all_respond();  // a stopped rank, which would be waited for
  monitor_.send(ControlChannel::kAll,
                {.kind = ControlMessage::Kind::departure, .text = options_.first_failure_cause()});
  const std::lock_guard lock(engine_->mutex());
  const bool failed =
      silent || std::ranges::any_of(peers_, [](const PeerStatus& p) { return p.died || p.disconnected; });
  transport_->close(failed);
  update_transport_polling();
}

void HostRuntime::process_exits() noexcept {
  const auto any_in_flight = [this] {
    const std::lock_guard lock(engine_->mutex());
    return std::ranges::any_of(groups_,
                               [](const HostGroup* group) { return group->any_in_flight() || group->failed(); });
  };
  if (!any_in_flight()) leave();
}

HostRuntime::~HostRuntime() {
  leave();
  if (engine_ != nullptr) engine_->remove(*this);  // its thread sends on the channel when a connection is lost
  monitor_.close();                                // its thread uses the members below
  engine_.reset();
  transport_.reset();
}

void HostRuntime::add(HostGroup& group) {
  groups_.push_back(&group);
  monitor_.add(group.id(), group.called());
  std::vector<ControlMessage> early;
  early.swap(early_);
  for (const ControlMessage& message : early) handle(message);
}

void HostRuntime::remove(HostGroup& group) {
  std::erase(groups_, &group);
  monitor_.remove(group.id());
}

void HostRuntime::make_runnable(ScheduleExecutor& op) noexcept {
  if (op.runnable) return;
  op.runnable = true;
  runnable_.push_back(&op);
}

void HostRuntime::remove_runnable(ScheduleExecutor& op) noexcept {
  if (op.runnable) std::ranges::replace(runnable_, &op, static_cast<ScheduleExecutor*>(nullptr));
  op.runnable = false;
}

bool HostRuntime::poll(bool with_health_check) noexcept {
  if (any_received_.load()) handle_messages();
  bool moved = false;
  ActiveGroups& active = engine_->active_groups();
  active.update();
  for (auto* group = active.first<HostGroup>(); group != nullptr; group = ActiveGroups::after(*group))
    moved |= group->begin_submitted();
  moved |= run_ready();
  if (transport_->poll(with_health_check)) {
    moved = true;
    stirred_ = true;
  }
  for (auto* group = active.first<HostGroup>(); group != nullptr; group = ActiveGroups::after(*group))
    moved |= group->find_senders();
  moved |= run_ready();
  if (polls_for_transport_) update_transport_polling();
  if (!with_health_check) return moved;
  if (std::exchange(stirred_, false)) last_moved_ = Clock::now();
  for (auto* group = active.first<HostGroup>(); group != nullptr; group = ActiveGroups::after(*group))
    group->check_health();
  report_transport_failure();
  return moved;
}

void HostRuntime::update_transport_polling() noexcept {
  const bool needed = transport_->needs_polls() || !transport_failure_.empty();
  if (std::exchange(polls_for_transport_, needed) == polls_for_transport_) return;
  polls_for_transport_ ? engine_->begin_operation() : engine_->end_operation();
}

/// Runs what is ready, including what becomes ready by that, but nothing twice: the transport is polled in between.
bool HostRuntime::run_ready() noexcept {
  bool moved = false;
  const std::size_t now = runnable_.size();
  for (std::size_t i = 0; i < now; ++i) {
    ScheduleExecutor* op = std::exchange(runnable_[i], nullptr);
    if (op == nullptr) continue;
    op->runnable = false;
    moved |= op->run(kComputeBytes);
    if (op->ready()) {
      make_runnable(*op);
    } else {
      static_cast<HostGroup&>(*op->group).complete_if_done(*op);
    }
  }
  std::erase(runnable_, nullptr);
  return moved;
}

void HostRuntime::connection_lost(int rank, const std::string& why) noexcept {
  PeerStatus& peer = peers_[static_cast<std::size_t>(rank)];
  if (peer.disconnected) return;
  peer.disconnected = true;
  peer.since = Clock::now();
  if (!peer.left) peer.why = why;
  if (const std::vector<int> route = bootstrap_->route(rank); !route.empty())
    peer.probe = monitor_.send_probe(route.back());
}

/// On the control thread.
void HostRuntime::receive(ControlMessage message) noexcept {
  {
    const std::lock_guard lock(received_mutex_);
    received_.push_back(std::move(message));
    any_received_.store(true);
  }
  engine_->wake_waiters();
  engine_->wake_progress_thread();
}

void HostRuntime::handle_messages() noexcept {
  std::vector<ControlMessage> received;
  {
    const std::lock_guard lock(received_mutex_);
    received.swap(received_);
    any_received_.store(false);
  }
  for (const ControlMessage& message : received) handle(message);
}

void HostRuntime::handle(const ControlMessage& message) noexcept {
  PeerStatus& sender = peers_[static_cast<std::size_t>(message.from)];
  if (message.kind == ControlMessage::Kind::departure) {
    sender.left = true;
    sender.since = Clock::now();
    sender.why = message.text;
    return;
  }
  if (message.kind == ControlMessage::Kind::peer_lost) {
    sender.died = !sender.left;
    for (std::size_t i = 0; i < groups_.size(); ++i) groups_[i]->check_health();
    return;
  }
  if (message.kind == ControlMessage::Kind::damaged)
    return message_damaged(message.from, "a message of the control channel", true);
  const auto found =
      std::ranges::find_if(groups_, [&](const HostGroup* group) { return group->id() == message.communicator; });
  const int member = found == groups_.end() ? -1 : (*found)->member_of(message.from);
  if (member < 0) {
    if (early_.size() < kMaxEarly) early_.push_back(message);
    return;
  }
  if (message.kind == ControlMessage::Kind::failure)
    (*found)->fail({static_cast<FailureKind>(message.number), message.text}, false);
  if (message.kind == ControlMessage::Kind::op_signature) (*found)->on_op_signature(member, message);
}

std::string HostRuntime::describe_forwarder(int world_rank, const HostGroup& group) const {
  const int member = group.member_of(world_rank);
  const PeerStatus& status = peer(world_rank);
  const char* const state = status.died ? " died" : status.left ? " has left" : " is not responding";
  if (member >= 0) return group.rank_name(member) + state + ", so the progress of the others is unknown";
  return "rank " + std::to_string(options_.global_rank(world_rank)) + state +
         ", which forwards the progress queries of this communicator";
}

/// A leaving rank's message is forwarded by others. While the one next to it doesn't reply, a connection that ended may
/// have been closed normally.
bool HostRuntime::would_know_departure(int world_rank) const {
  const std::vector<int> route = bootstrap_->route(world_rank);
  const auto is_gone = [this](int forwarder) {
    const PeerStatus& status = peer(forwarder);
    return status.died || status.left || status.disconnected;
  };
  return route.empty() || std::ranges::any_of(route, is_gone) ||
         monitor_.replied_to_probe(route.back(), peer(world_rank).probe);
}

/// A library may detect a dead rank first, with its own message: wait a while for the actual cause to be reported.
void HostRuntime::transport_failed(const std::string& why) noexcept {
  if (!transport_failure_.empty()) return;
  transport_failure_ = capabilities_.backend + ": " + why;
  transport_blamed_at_ = Clock::now() + kVerdictTime;
  update_transport_polling();
}

/// No other cause is possible, so don't wait for one.
void HostRuntime::message_damaged(int peer, const std::string& what, bool authenticated) noexcept {
  transport_failure_ = capabilities_.backend + ": " + what + " from " +
                       describe_rank(peer, options_.global_rank(peer)) +
                       (authenticated ? " was changed on the way: its authentication code is wrong; check the devices "
                                        "between the two hosts, and "
                                      : " is damaged: its checksum is wrong; check the network and the memory of the "
                                        "two hosts, and ") +
                       "resume from the last checkpoint";
  transport_blamed_at_ = Clock::now();
  update_transport_polling();
}

void HostRuntime::report_transport_failure() noexcept {
  if (transport_failure_.empty() || Clock::now() < transport_blamed_at_) return;
  const std::string why = std::exchange(transport_failure_, {});
  for (std::size_t i = 0; i < groups_.size(); ++i) groups_[i]->fail({FailureKind::backend, why}, true);
}

}  // namespace tessera::comm::host
