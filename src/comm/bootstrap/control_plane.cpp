#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>

#include "tessera/base/deadline.h"
#include "tessera/base/parse.h"
#include "tessera/base/thread.h"
#include "tessera/comm/bootstrap/control_plane.h"

namespace tessera::comm {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using namespace std::chrono_literals;

constexpr auto kFarewellTime = 1s;
/// A process that ended may have sent a message about it; the message comes through rank 0 and takes time.
constexpr auto kLastWordsTime = 200ms;

std::string name_of(int rank) { return "rank " + std::to_string(rank); }

ControlConnection::Frame make_frame(protocol::Type type, std::string payload) {
  return std::make_shared<const ControlConnection::Message>(ControlConnection::Message{type, std::move(payload)});
}

}  // namespace

struct ControlPlane::Channel {
  std::uint16_t number = 0;
  std::string name;
  ControlEvents events;
  bool complete = false;         // under the control plane's mutex: all have opened it ...
  bool failed = false;           // ... or opening failed
  std::recursive_mutex running;  // held while an event runs, which may close the channel itself
  bool closed = false;
};

class ControlPlane::Handle final : public ControlChannel {
 public:
  Handle(ControlPlane& board, ChannelPointer channel) : board_(board), channel_(std::move(channel)) {}
  ~Handle() override { board_.close(channel_); }
  void send(int to, std::string_view message) noexcept override {
    try {
      board_.send_message(*channel_, to, message);
    } catch (const std::bad_alloc&) {  // no memory for a message: it is lost, and so would be a report
    }
  }

 private:
  ControlPlane& board_;
  const ChannelPointer channel_;
};

ControlPlane::ControlPlane(asio::io_context& context, Members members)
    : context_(context),
      rank_(members.rank),
      tree_(members.tree),
      timeout_(members.timeout),
      lines_(static_cast<std::size_t>(members.tree.size)) {
  for (std::size_t r = 0; r < members.links.size(); ++r) {
    if (!members.links[r]) continue;
    const int rank = static_cast<int>(r);
    lines_[r] = std::make_unique<ControlConnection>(
        context_, std::move(members.links[r]),
        ControlConnection::Events{
            .frame = [this, rank](protocol::Type type,
                                  std::string_view payload) { return on_frame(rank, type, payload); },
            .broken = [this, rank] { gone(rank, false); },
            .damaged = [this, rank] { damaged(rank); }});
    lines_[r]->start();
  }
  for (std::size_t r = 0; r < members.pids.size(); ++r)  // in a large world only neighbours, for want of descriptors
    if (static_cast<int>(r) != rank_ && members.pids[r] > 0 && (tree_.is_star() || lines_[r] != nullptr))
      watch_process(static_cast<int>(r), members.pids[r]);
  context_.restart();
  thread_ = base::start_thread([this] {
    const auto guard = asio::make_work_guard(context_);
    context_.run();
  });
}

ControlPlane::~ControlPlane() {
  asio::post(context_, [this] { leave(); });
  thread_.join();
}

std::unique_ptr<ControlChannel> ControlPlane::open(std::string_view name, ControlEvents events) {
  if (name.empty() || name.size() > protocol::kMaxName)
    throw InvalidUsage("control channel: a name has 1 to " + std::to_string(protocol::kMaxName) + " characters, not '" +
                       std::string(name) + "'");
  const auto channel = std::make_shared<Channel>();
  channel->name = name;
  channel->events = std::move(events);
  std::unique_lock lock(mutex_);
  channel->number = next_channel_++;
  channels_.emplace(channel->number, channel);
  const protocol::ChannelOpened opened{channel->number, channel->name};
  asio::post(context_, [this, opened] { on_opened(rank_, opened); });
  const bool in_time =
      changed_.wait_until(lock, base::deadline_after(timeout_), [&] { return channel->complete || !broken_.empty(); });
  if (channel->complete) return std::make_unique<Handle>(*this, channel);
  channels_.erase(channel->number);
  if (in_time) {
    const std::string text = "init: control channel '" + channel->name + "' can't be opened: " + broken_;
    if (damaged_) throw BackendError(text + "; check the network between the hosts, and start again");
    throw PeerLost(text);
  }
  throw Timeout("init: not all ranks opened the control channel '" + channel->name + "' within " +
                format_duration(timeout_));
}

void ControlPlane::send_message(const Channel& channel, int to, std::string_view message) {
  if (to == rank_ || to < ControlChannel::kAll || to >= tree_.size) return;
  message = message.substr(0, ControlChannel::kMaxMessage);
  send(to, protocol::Type::message, protocol::encode(protocol::ChannelMessage{channel.number, rank_, to, message}));
}

void ControlPlane::close(const ChannelPointer& channel) {
  {
    const std::lock_guard lock(mutex_);
    channels_.erase(channel->number);
  }
  const std::lock_guard running(channel->running);
  channel->closed = true;
}

/// To the neighbour that leads to rank `to`; for kAll to all neighbours but `except`.
void ControlPlane::send(int to, protocol::Type type, std::string_view payload, int except) {
  const ControlConnection::Frame frame = make_frame(type, std::string(payload));
  const int only = to == ControlChannel::kAll ? to : tree_.next_hop(rank_, to);
  for (int r = 0; r < tree_.size; ++r)
    if (line(r) != nullptr && (only == ControlChannel::kAll ? r != except : r == only)) line(r)->send(frame);
}

ControlPlane::ChannelPointer ControlPlane::find(std::uint16_t number) {
  const std::lock_guard lock(mutex_);
  const auto found = channels_.find(number);
  return found == channels_.end() ? nullptr : found->second;
}

bool ControlPlane::on_frame(int from, protocol::Type type, std::string_view payload) {
  if (type == protocol::Type::message) return on_message(from, payload);
  if (type == protocol::Type::lost || type == protocol::Type::left) return on_gone(from, type, payload);
  if (type == protocol::Type::probe) return on_probe(from);
  const std::optional<protocol::ChannelOpened> opened = protocol::decode_opened(payload);
  if (type != protocol::Type::opened || !opened) return false;
  if (from != tree_.parent(rank_)) return on_opened(from, *opened);
  opened_by_all(*opened);
  return true;
}

bool ControlPlane::is_behind(int neighbour, int rank) const noexcept {
  return rank >= 0 && rank < tree_.size && rank != rank_ && tree_.next_hop(rank_, rank) == neighbour;
}

bool ControlPlane::on_message(int from, std::string_view payload) {
  const std::optional<protocol::ChannelMessage> sent = protocol::decode_message(payload);
  if (!sent || !is_behind(from, sent->from) || sent->to < ControlChannel::kAll || sent->to >= tree_.size ||
      is_behind(from, sent->to))
    return false;
  if (sent->to != rank_) send(sent->to, protocol::Type::message, payload, from);
  if (sent->to != rank_ && sent->to != ControlChannel::kAll) return true;
  const ChannelPointer channel = find(sent->channel);
  if (channel == nullptr) return true;  // closed on this rank, still open on the sender
  const std::lock_guard running(channel->running);
  if (!channel->closed && channel->events.message) channel->events.message(sent->from, sent->message);
  return true;
}

bool ControlPlane::on_opened(int from, const protocol::ChannelOpened& opened) {
  ChannelOpening& opening = openings_[opened.channel];
  if (opening.ranks.empty()) opening.name = opened.name;
  if (opening.name != opened.name) return false;
  opening.ranks.insert(from);
  if (static_cast<int>(opening.ranks.size()) < 1 + tree_.first_child(rank_ + 1) - tree_.first_child(rank_)) return true;
  openings_.erase(opened.channel);
  if (rank_ == 0)
    opened_by_all(opened);
  else
    send(tree_.parent(rank_), protocol::Type::opened, protocol::encode(opened));
  return true;
}

void ControlPlane::opened_by_all(const protocol::ChannelOpened& opened) {
  send(ControlChannel::kAll, protocol::Type::opened, protocol::encode(opened), tree_.parent(rank_));
  const std::lock_guard lock(mutex_);
  const auto found = channels_.find(opened.channel);
  if (found == channels_.end() || found->second->failed) return;
  found->second->complete = true;
  changed_.notify_all();
}

bool ControlPlane::on_gone(int from, protocol::Type type, std::string_view payload) {
  const std::optional<int> rank = protocol::decode_rank(payload);
  if (!rank || !is_behind(from, *rank) || (*rank == from && type != protocol::Type::left)) return false;
  gone(*rank, type == protocol::Type::left);
  return true;
}

void ControlPlane::gone(int rank, bool in_good_order) {
  if (!gone_.insert(rank).second) return stop_when_alone();
  if (line(rank) != nullptr) line(rank)->close();
  if (leaving_) return stop_when_alone();
  send(ControlChannel::kAll, in_good_order ? protocol::Type::left : protocol::Type::lost, protocol::encode_rank(rank),
       tree_.next_hop(rank_, rank));
  std::vector<ChannelPointer> open;
  {
    const std::lock_guard lock(mutex_);
    if (broken_.empty()) broken_ = name_of(rank) + (in_good_order ? " has left" : " died");
    open = break_channels();
  }
  if (rank == tree_.parent(rank_)) judge_ended();
  if (in_good_order) return;
  for (const ChannelPointer& channel : open) {
    const std::lock_guard running(channel->running);
    if (!channel->closed && channel->events.lost) channel->events.lost(rank);
  }
}

/// Returns the complete channels. Called under the mutex.
std::vector<ControlPlane::ChannelPointer> ControlPlane::break_channels() {
  std::vector<ChannelPointer> open;
  for (const auto& [number, channel] : channels_) {
    if (channel->complete)
      open.push_back(channel);
    else
      channel->failed = true;
  }
  changed_.notify_all();
  return open;
}

/// The connection stays open for this rank's report.
void ControlPlane::damaged(int rank) {
  if (leaving_) return gone(rank, false);
  std::vector<ChannelPointer> open;
  {
    const std::lock_guard lock(mutex_);
    if (broken_.empty()) {
      broken_ = "a message from " + name_of(rank) + " is damaged or forged";
      damaged_ = true;
    }
    open = break_channels();
  }
  for (const ChannelPointer& channel : open) {
    const std::lock_guard running(channel->running);
    if (channel->closed) continue;
    if (channel->events.damaged)
      channel->events.damaged(rank);
    else if (channel->events.lost)
      channel->events.lost(rank);
  }
}

/// A parent replies; its child learns that it is alive and has forwarded all it knew of ranks that ended.
bool ControlPlane::on_probe(int from) {
  if (from == tree_.parent(rank_))
    judge_ended();
  else
    send(from, protocol::Type::probe, {});
  return true;
}

void ControlPlane::judge_ended() {
  for (const int rank : std::exchange(ended_, {})) gone(rank, false);
}

/// A process has ended, and its goodbye had time to arrive: a neighbour's on its own connection, another's, in a star,
/// through rank 0. A stopped rank 0 forwards nothing, and then it is unknown how the process ended.
void ControlPlane::on_end(int rank) {
  const int hop = tree_.next_hop(rank_, rank);
  if (hop == rank || line(hop) == nullptr || !line(hop)->open()) return gone(rank, false);
  ended_.insert(rank);
  send(hop, protocol::Type::probe, {});
}

/// A process descriptor becomes readable when the process ends for any reason, even if a child holds its connection
/// open, and when rank 0 has left. Old kernels have none; then only the connections are used.
void ControlPlane::watch_process(int rank, int pid) {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!fd) return;
  await_end(rank, processes_.emplace_back(context_, fd.release()), timers_.emplace_back(context_));
}

void ControlPlane::await_end(int rank, asio::posix::stream_descriptor& process, asio::steady_timer& timer) {
  process.async_wait(asio::posix::stream_descriptor::wait_read, [&, this, rank](const error_code& error) {
    if (error) return;
    // Asio may deliver the event of a closed descriptor to the next one registered: check it directly.
    pollfd ended{process.native_handle(), POLLIN, 0};
    if (::poll(&ended, 1, 0) <= 0) return await_end(rank, process, timer);
    timer.expires_after(kLastWordsTime);
    timer.async_wait([this, rank](const error_code& cancelled) {
      if (!cancelled) on_end(rank);
    });
  });
}

/// Says goodbye, and keeps reading until the others have acknowledged: closing a connection with unread bytes may
/// discard what was sent last.
void ControlPlane::leave() {
  leaving_ = true;
  for (const auto& line : lines_) {
    if (line == nullptr || !line->open()) continue;
    line->send(make_frame(protocol::Type::left, protocol::encode_rank(rank_)));
    line->finish();
  }
  auto& timer = timers_.emplace_back(context_, kFarewellTime);
  timer.async_wait([this](const error_code& error) {
    if (!error) context_.stop();
  });
  stop_when_alone();
}

void ControlPlane::stop_when_alone() {
  if (!leaving_) return;
  for (const auto& line : lines_)
    if (line != nullptr && line->open()) return;
  context_.stop();
}

}  // namespace tessera::comm
