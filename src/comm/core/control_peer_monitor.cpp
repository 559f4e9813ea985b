#include "tessera/comm/core/control_peer_monitor.h"

#include <algorithm>
#include <charconv>
#include <numeric>
#include <set>

#include "tessera/base/text.h"
#include "tessera/comm/failure.h"
#include "tessera/comm/transport.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kMaxText = 4096;

bool parse_number(std::string_view& text, std::uint64_t& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end == text.data() + text.size() || *end != ' ') return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()) + 1);
  return true;
}

constexpr auto kReplyTime = std::chrono::seconds(1);  ///< a live rank replies within microseconds, if it gets a core
constexpr std::uint64_t kProbe = kMaxCommunicators;   ///< no communicator: the query only shows that the rank replies

}  // namespace

// The text of a notice: kind, three numbers, then free text to the end.
std::string format_message(const ControlMessage& message) {
  return std::string(1, static_cast<char>(message.kind)) + std::to_string(message.communicator) + " " +
         std::to_string(message.number) + " " + std::to_string(message.value) + " " + message.text.substr(0, kMaxText);
}

std::optional<ControlMessage> parse_message(std::string_view text) {
  constexpr std::string_view kKinds = "FQACGSL";  // loss and damage are never sent, only detected
  if (text.empty() || kKinds.find(text.front()) == std::string_view::npos) return std::nullopt;
  ControlMessage message;
  message.kind = static_cast<ControlMessage::Kind>(text.front());
  text.remove_prefix(1);
  if (!parse_number(text, message.communicator) || !parse_number(text, message.number) ||
      !parse_number(text, message.value) || text.size() > kMaxText)
    return std::nullopt;
  if (message.kind == ControlMessage::Kind::failure &&
      (message.number == 0 || message.number > static_cast<std::uint64_t>(FailureKind::backend)))
    return std::nullopt;
  message.text = printable(text);
  return message;
}

ControlPeerMonitor::ControlPeerMonitor(Bootstrap& bootstrap)
    : bootstrap_(bootstrap),
      replies_(static_cast<std::size_t>(bootstrap.size())),
      peers_(static_cast<std::size_t>(bootstrap.size()), Peer::responds),
      probe_replies_(static_cast<std::size_t>(bootstrap.size())) {
  peers_[static_cast<std::size_t>(bootstrap.rank())] = Peer::gone;  // not asked
}

void ControlPeerMonitor::open(std::string_view name, std::function<void(ControlMessage)> on_message) {
  const auto on_text = [this, on_message](int from, std::string_view text) {
    std::optional<ControlMessage> message = parse_message(text);
    if (!message) return;
    message->from = from;
    if (message->kind == ControlMessage::Kind::progress_query) return on_query(*message);
    if (message->kind == ControlMessage::Kind::progress_reply) return on_reply(*message);
    if (message->kind == ControlMessage::Kind::departure && message->communicator == 0) on_gone(from);  // the world's
    on_message(std::move(*message));
  };
  channel_ = bootstrap_.open_channel(
      name, {.lost =
                 [this, on_message](int rank) {
                   on_gone(rank);
                   on_message({.kind = ControlMessage::Kind::peer_lost, .from = rank});
                 },
             .message = on_text,
             .damaged = [on_message](int rank) { on_message({.kind = ControlMessage::Kind::damaged, .from = rank}); }});
  open_channel_.store(channel_.get());
}

void ControlPeerMonitor::close() noexcept {
  open_channel_.store(nullptr);
  channel_.reset();
}

void ControlPeerMonitor::add(std::uint64_t communicator, LastCall called) {
  const std::lock_guard lock(mutex_);
  called_[communicator] = std::move(called);
}

void ControlPeerMonitor::remove(std::uint64_t communicator) {
  const std::lock_guard lock(mutex_);
  called_.erase(communicator);
}

void ControlPeerMonitor::send(int rank, const ControlMessage& message) noexcept {
  if (ControlChannel* const channel = open_channel_.load()) channel->send(rank, format_message(message));
}

void ControlPeerMonitor::send(std::span<const int> ranks, const ControlMessage& message) noexcept {
  ControlChannel* const channel = open_channel_.load();
  if (channel == nullptr) return;
  const std::string text = format_message(message);
  for (const int rank : ranks)
    if (rank != bootstrap_.rank()) channel->send(rank, text);
}

void ControlPeerMonitor::on_query(const ControlMessage& query) noexcept {
  ControlMessage reply{
      .kind = ControlMessage::Kind::progress_reply, .communicator = query.communicator, .number = query.number};
  {
    const std::lock_guard lock(mutex_);
    const auto found = called_.find(query.communicator);
    if (found != called_.end()) reply.value = found->second->load();
  }
  send(query.from, reply);
}

void ControlPeerMonitor::on_reply(const ControlMessage& reply) noexcept {
  const std::lock_guard lock(mutex_);
  if (reply.communicator == kProbe) {
    probe_replies_[static_cast<std::size_t>(reply.from)] = reply.number;
    return;
  }
  if (Peer& peer = peers_[static_cast<std::size_t>(reply.from)]; peer == Peer::silent) peer = Peer::responds;
  if (reply.number == query_) replies_[static_cast<std::size_t>(reply.from)] = reply.value;
  replied_.notify_all();
}

void ControlPeerMonitor::on_gone(int rank) noexcept {
  const std::lock_guard lock(mutex_);
  peers_[static_cast<std::size_t>(rank)] = Peer::gone;
  replied_.notify_all();
}

std::vector<std::optional<std::uint64_t>> ControlPeerMonitor::query_progress(std::uint64_t communicator,
                                                                             std::span<const int> ranks) noexcept {
  const std::lock_guard one_at_a_time(query_mutex_);
  std::unique_lock lock(mutex_);
  const std::uint64_t query = ++query_;
  std::ranges::fill(replies_, std::nullopt);
  lock.unlock();
  std::set<int> queried(ranks.begin(), ranks.end());
  for (const int rank : ranks)
    for (const int forwarder : bootstrap_.route(rank)) queried.insert(forwarder);
  const std::vector<int> all(queried.begin(), queried.end());
  send(all, {.kind = ControlMessage::Kind::progress_query, .communicator = communicator, .number = query});
  lock.lock();
  const auto awaited = [&](int rank) {
    const auto of = static_cast<std::size_t>(rank);
    return peers_[of] == Peer::responds && !replies_[of].has_value();
  };
  replied_.wait_for(lock, kReplyTime, [&] { return std::ranges::none_of(all, awaited); });
  for (const int rank : all)
    if (awaited(rank)) peers_[static_cast<std::size_t>(rank)] = Peer::silent;
  return replies_;
}

int ControlPeerMonitor::silent_forwarder(int rank, std::span<const std::optional<std::uint64_t>> replies) const {
  const std::vector<int> route = bootstrap_.route(rank);
  const auto silent =
      std::ranges::find_if(route, [&](int forwarder) { return !replies[static_cast<std::size_t>(forwarder)]; });
  return silent == route.end() ? -1 : *silent;
}

bool ControlPeerMonitor::all_respond() noexcept {
  std::vector<int> all(static_cast<std::size_t>(bootstrap_.size()));
  std::iota(all.begin(), all.end(), 0);
  query_progress(0, all);
  const std::lock_guard lock(mutex_);
  return std::ranges::count(peers_, Peer::silent) == 0;
}

std::uint64_t ControlPeerMonitor::send_probe(int rank) noexcept {
  const std::uint64_t probe = ++probes_;
  send(rank, {.kind = ControlMessage::Kind::progress_query, .communicator = kProbe, .number = probe});
  return probe;
}

bool ControlPeerMonitor::replied_to_probe(int rank, std::uint64_t probe) const noexcept {
  const std::lock_guard lock(mutex_);
  return probe_replies_[static_cast<std::size_t>(rank)] >= probe;
}

}  // namespace tessera::comm
