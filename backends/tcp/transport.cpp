#include "backends/tcp/transport.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>
#include <exception>
#include <sstream>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"

namespace tessera::comm::tcp {
namespace {

using namespace std::chrono_literals;

constexpr std::size_t kBudget = 1 << 20;  // bytes per connection, direction and poll(), for fairness
constexpr std::size_t kFewStreams = 2;    // are read one by one, without epoll
constexpr std::size_t kEvents = 64;       // at once
constexpr auto kMaxClose = 2s;

/// The scope of a link-local IPv6 address: the number that this host has given to the interface.
unsigned long scope_of(const Address& address) { return address.is_v6() ? address.to_v6().scope_id() : 0; }

Address with_scope(const Address& address, unsigned long scope) {
  if (!address.is_v6() || !address.to_v6().is_link_local()) return address;
  return boost::asio::ip::address_v6(address.to_v6().to_bytes(), scope);
}

/// Returns "PORT ADDRESS" of this rank.
std::string open_listener(MeshConnector& connector, const Bootstrap& bootstrap, const TcpOptions& settings) {
  const std::vector<Interface> interfaces = list_interfaces();
  const auto& hosts = bootstrap.hosts();
  const bool alone = std::ranges::count(hosts, hosts[static_cast<std::size_t>(bootstrap.rank())]) == 1;
  if (!alone &&
      std::ranges::none_of(interfaces, [](const Interface& one) { return one.up && one.address.is_loopback(); }))
    throw SystemError(
        "tcp: the loopback interface of this rank's host is down, by which the ranks on it connect (ip link set lo "
        "up)");
  const Address usual = boost::asio::ip::make_address(bootstrap.local_address());
  const Address address = choose_address(settings.interfaces, interfaces, usual);
  return std::to_string(connector.listen(address).port()) + " " + with_scope(address, 0).to_string();
}

/// Link-local addresses get this rank's scope.
std::vector<Endpoint> read_lines(const std::vector<std::string>& lines, unsigned long scope) {
  std::vector<Endpoint> endpoints;
  for (const std::string& line : lines) {
    std::istringstream words(line);
    std::string address;
    std::uint16_t port = 0;
    words >> port >> address;
    boost::system::error_code error;
    endpoints.emplace_back(with_scope(boost::asio::ip::make_address(address, error), scope), port);
    if (!words || error)
      throw SystemError("tcp: rank " + std::to_string(endpoints.size() - 1) + " sent no address: '" + line + "'");
  }
  return endpoints;
}

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

ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout,
                            const TlsContext* tls) {
  const int streams = streams_for(settings, bootstrap.hosts());
  const bool on_demand = connects_on_demand(settings, bootstrap.size(), streams);
  require_alike(bootstrap, [&] { return shared_settings(settings, streams, on_demand); });
  auto connector = std::make_unique<MeshConnector>(bootstrap.rank(), streams, bootstrap.token(), tls);
  const std::vector<std::string> lines =
      exchange(bootstrap, [&] { return open_listener(*connector, bootstrap, settings); });
  const std::vector<Endpoint> endpoints =
      read_lines(lines, scope_of(boost::asio::ip::make_address(bootstrap.local_address())));
  const auto limit = timeout / 4 * 3;  // a quarter of the timeout remains to report the unreachable ranks
  ConnectionMesh mesh;
  mesh.codes = tls != nullptr ? std::vector<FrameCodes>(lines.size(), FrameCodes::header_checksum)
                              : codes_by_rank(settings, bootstrap.hosts(), bootstrap.rank());
  mesh.address = endpoints[static_cast<std::size_t>(bootstrap.rank())].address().to_string();
  if (on_demand) {
    connector->serve(endpoints, limit);
    mesh.connector = std::move(connector);
    mesh.connections.resize(lines.size());
    return mesh;
  }
  exchange(bootstrap, [&] {
    const std::string complaint = connector->run(endpoints, limit);
    if (!complaint.empty()) throw Timeout(complaint);
    return complaint;
  });
  mesh.connections = connector->release_streams();
  return mesh;
}

namespace {

/// The value of wakes_ that arm() saw; the same thread then calls sleep().
thread_local std::uint32_t t_seen = 0;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables): a thread's own

constexpr std::chrono::nanoseconds kShort = std::chrono::milliseconds(1);

}  // namespace

EpollWaiter::EpollWaiter() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), woken_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !woken_) throw system_error("tcp: epoll_create1 or eventfd");
}

bool EpollWaiter::arm() noexcept {
  t_seen = wakes_.load();
  // A sleeping thread may not have seen the eventfd yet; a thread about to sleep compares wakes_.
  if (sleeping_.load() != 0) return true;
  eventfd_t count = 0;
  ::eventfd_read(woken_.get(), &count);  // fails if there was no wake
  if (wakes_.load() == t_seen) return true;
  signal();  // a wake came meanwhile, and a thread may have slept before it
  return false;
}

/// Only fails if it is readable.
void EpollWaiter::signal() noexcept { ::eventfd_write(woken_.get(), 1); }

void EpollWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  sleeping_.fetch_add(1);
  if (wakes_.load() == t_seen) {
    if (short_.load()) at_most = std::min(at_most, kShort);
    const timespec time{static_cast<time_t>(at_most.count() / 1'000'000'000),
                        static_cast<long>(at_most.count() % 1'000'000'000)};
    std::array<pollfd, 2> entries{{{epoll_.get(), POLLIN, 0}, {woken_.get(), POLLIN, 0}}};
    ::ppoll(entries.data(), entries.size(), &time, nullptr);
  }
  sleeping_.fetch_sub(1);
}

void EpollWaiter::wake() noexcept {
  wakes_.fetch_add(1);
  signal();
}

}  // namespace tessera::comm::tcp
