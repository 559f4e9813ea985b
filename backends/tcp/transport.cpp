#include "backends/tcp/transport.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <exception>
#include <string>
#include <utility>

#include "backends/tcp/connection_mesh.h"
#include "tessera/base/log.h"

namespace tessera::comm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kBudget = 1 << 20;  // bytes per connection, direction and poll(), for fairness
constexpr std::size_t kFewStreams = 2;    // are read one by one, without epoll
constexpr std::size_t kEvents = 64;       // at once
constexpr auto kMaxClose = 2s;

}  // namespace

TcpTransport::TcpTransport(int rank, ConnectionMesh mesh, TransportEvents& events)
    : rank_(rank), events_(events), connector_(std::move(mesh.connector)), reported_(mesh.connections.size(), false) {
  for (std::size_t r = 0; r < mesh.connections.size(); ++r) {
    std::unique_ptr<PeerConnection>& peer = peers_.emplace_back();
    if (r == static_cast<std::size_t>(rank)) continue;
    peer = std::make_unique<PeerConnection>(mesh.codes[r], waiter_.epoll());
    if (connector_ == nullptr) connect(r, std::move(mesh.connections[r]));
  }
  if (connector_ == nullptr) return;
  epoll_event event = {};
  event.events = EPOLLIN | EPOLLET;  // the connector may accept later
  if (::epoll_ctl(waiter_.epoll(), EPOLL_CTL_ADD, connector_->listener(), &event) != 0)
    throw system_error("tcp: epoll_ctl");
}

void TcpTransport::connect(std::size_t rank, std::vector<MeshConnection> connections) {
  peers_[rank]->connect(context_, std::move(connections));
  connected_.push_back(rank);
  for (const auto& stream : peers_[rank]->streams()) streams_.push_back(stream.get());
}

/// True if a connection was made.
bool TcpTransport::connect_more() {
  if (!std::exchange(can_accept_, false) && !connector_->busy()) return false;
  bool moved = false;
  for (MeshConnector::Outcome& one : connector_->poll()) {
    PeerConnection& peer = *peers_[one.rank];
    if (!one.failure.empty()) {
      peer.drop(one.failure);
      connected_.push_back(one.rank);
      continue;
    }
    moved = true;
    connect(one.rank, std::move(one.streams));
    for (const auto& stream : peer.streams())  // the handshake may have read more, as at the first poll()
      if (stream->socket.is_open()) peer.read(*stream, kBudget);
  }
  waiter_.keep_short(connector_->busy());
  return moved;
}

/// Out of memory fails this transport, not the process.
template <class F>
void TcpTransport::guarded(F&& call) noexcept {
  if (failed_) return;
  try {
    call();
  } catch (const std::exception& error) {
    failed_ = true;
    events_.transport_failed(error.what());
    return;
  }
  report_losses();
}

void TcpTransport::report_losses() noexcept {
  for (const std::size_t r : connected_) {
    if (!peers_[r]->gone() || peers_[r]->loss().empty() || reported_[r]) continue;
    reported_[r] = true;
    if (peers_[r]->damaged())
      events_.message_damaged(static_cast<int>(r), peers_[r]->loss(), peers_[r]->authenticated());
    else
      events_.connection_lost(static_cast<int>(r), peers_[r]->loss());
  }
}

PeerConnection* TcpTransport::peer_of(const Message& message) noexcept {
  if (message.peer >= 0 && static_cast<std::size_t>(message.peer) < peers_.size() && message.peer != rank_)
    return peers_[static_cast<std::size_t>(message.peer)].get();
  failed_ = true;
  events_.transport_failed("a message between ranks " + std::to_string(rank_) + " and " + std::to_string(message.peer));
  return nullptr;
}

void TcpTransport::send(Message& message) noexcept {
  message.state = kIdle;
  guarded([&] {
    PeerConnection* const peer = peer_of(message);
    if (peer == nullptr) return;
    peer->send(message);
    if (peer->connected() || peer->gone()) return;
    connector_->want(static_cast<std::size_t>(message.peer));
    waiter_.keep_short(true);
    waiter_.wake();  // a thread may sleep for longer
  });
}

void TcpTransport::receive(Message& message) noexcept {
  message.state = kIdle;
  guarded([&] {
    if (PeerConnection* peer = peer_of(message)) peer->receive(message);
  });
}

bool TcpTransport::arrived(int peer, const MessageTag& tag) noexcept {
  return peers_[static_cast<std::size_t>(peer)]->arrived(tag);
}

void TcpTransport::cancel(Message& message) noexcept {
  if (message.state == kIdle) return;
  peers_[static_cast<std::size_t>(message.peer)]->cancel(message);
}

void TcpTransport::discard_communicator(std::uint32_t communicator) noexcept {
  guarded([&] {
    for (const auto& peer : peers_)
      if (peer != nullptr) peer->discard_communicator(communicator);
  });
}

bool TcpTransport::read_all() {
  bool moved = false;
  for (TcpStream* stream : streams_)
    if (stream->socket.is_open()) moved |= stream->peer.read(*stream, kBudget);
  return moved;
}

bool TcpTransport::read_ready() {
  std::array<epoll_event, kEvents> events;
  const int n = ::epoll_wait(waiter_.epoll(), events.data(), static_cast<int>(events.size()), 0);
  bool moved = false;
  for (int i = 0; i < n; ++i) {
    if (events[static_cast<std::size_t>(i)].data.ptr == nullptr) {  // the listener
      can_accept_ = true;
      continue;
    }
    auto& stream = *static_cast<TcpStream*>(events[static_cast<std::size_t>(i)].data.ptr);
    const std::uint32_t what = events[static_cast<std::size_t>(i)].events;
    if ((what & EPOLLOUT) != 0) stream.full = false;
    if ((what & ~std::uint32_t{EPOLLOUT}) != 0) moved |= stream.peer.read(stream, kBudget);
  }
  return moved;
}

bool TcpTransport::poll(bool with_health_check) noexcept {
  bool moved = false;
  guarded([&] {
    // The handshake may have read more of a TLS session than it needed: then no event of the socket tells so.
    const bool first = std::exchange(first_poll_, false);
    moved = connector_ == nullptr && (first || streams_.size() <= kFewStreams) ? read_all() : read_ready();
    if (connector_ != nullptr) moved |= connect_more();
    for (const std::size_t r : connected_) {
      PeerConnection& peer = *peers_[r];
      if (peer.gone()) continue;
      if (with_health_check) peer.send_pending_rts();
      moved |= peer.write(kBudget);
    }
  });
  return moved;
}

/// True if every peer is gone or has received all that it is to have; one that was never connected is to have nothing.
/// Closing a connection with unread data discards data still in transit to the peer: there is none.
bool TcpTransport::may_go() const noexcept {
  return std::ranges::all_of(connected_, [&](std::size_t r) { return peers_[r]->gone() || peers_[r]->has_all(); });
}

void TcpTransport::close(bool failed) noexcept {
  const Clock::time_point until = Clock::now() + kMaxClose;
  for (const std::size_t r : connected_) peers_[r]->queue_close();
  while (!failed && !failed_ && !may_go() && Clock::now() < until) {
    bool moved = false;
    try {
      moved = read_ready();
      for (const std::size_t r : connected_)
        if (!peers_[r]->gone()) moved |= peers_[r]->write(kBudget);
    } catch (const std::exception&) {  // out of memory: closes without the last frames
      break;
    }
    if (moved || may_go()) continue;
    waiter_.arm();
    waiter_.sleep(1ms);  // acknowledgement of the last byte wakes no thread
  }
  failed_ = true;
  connector_.reset();  // ranks that still want to connect see that this one listens no more
  for (const auto& peer : peers_)
    if (peer != nullptr && !peer->gone()) peer->drop("it was closed");
}

std::unique_ptr<TcpTransport> make_transport(Bootstrap& bootstrap, TransportEvents& events,
                                             const BackendOptions& options, const TcpOptions& settings) {
  TcpOptions agreed = settings;
  if (options.check && settings.checksum == Checksum::between_hosts) agreed.checksum = Checksum::everywhere;
  ConnectionMesh mesh = connect_mesh(bootstrap, agreed, options.communicator.timeout, options.tls.get());
  if (const auto& logger = options.communicator.logger)
    logger->write(LogLevel::info,
                  "tcp: rank " + std::to_string(bootstrap.rank()) + " of " + std::to_string(bootstrap.size()) + " at " +
                      mesh.address + ", " + std::to_string(streams_for(settings, bootstrap.hosts())) +
                      " connections to each other rank" + (mesh.connector != nullptr ? ", on demand" : ""));
  return std::make_unique<TcpTransport>(bootstrap.rank(), std::move(mesh), events);
}

std::unique_ptr<Transport> make_transport(Bootstrap& bootstrap, TransportEvents& events,
                                          const BackendOptions& options) {
  return make_transport(bootstrap, events, options, settings_from_environment());
}

}  // namespace tessera::comm::tcp
