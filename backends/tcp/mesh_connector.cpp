#include "backends/tcp/mesh_connector.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/parse.h"
#include "tessera/comm/bootstrap/handshake.h"

namespace tessera::comm::tcp {
namespace {

namespace asio = boost::asio;
using Failure = boost::system::error_code;
using namespace std::chrono_literals;

constexpr auto kStrangersTime = 10s;        // for authentication
constexpr auto kAttemptTime = 30s;          // of one outgoing connection attempt
constexpr std::size_t kMaxStrangers = 256;  // in addition to the ranks not yet connected
constexpr std::size_t kFewestStrangers = 4;
// While the ranks work, which need the processor: so many peers are accepted, then none for as long.
constexpr std::size_t kAcceptsAtOnce = 32;
constexpr auto kAcceptPause = 32ms;
constexpr const char* kNoAnswer = "it did not answer";  // introduce()'s: it may compute

/// Closes a socket when its time is up.
class TimeLimit {
 public:
  TimeLimit(const std::shared_ptr<Socket>& socket, std::chrono::milliseconds time)
      : timer_(socket->get_executor(), time) {
    timer_.async_wait([socket, kept = kept_](const Failure& failure) {
      Failure ignored;
      if (!failure && !*kept) socket->close(ignored);
    });
  }
  ~TimeLimit() { *kept_ = true; }  // it may have expired before its handler has run

 private:
  const std::shared_ptr<bool> kept_ = std::make_shared<bool>(false);
  asio::steady_timer timer_;
};

}  // namespace

MeshConnector::MeshConnector(int rank, int streams, const Bootstrap::Token& token, const TlsContext* tls)
    : rank_(static_cast<std::size_t>(rank)),
      streams_(static_cast<std::size_t>(streams)),
      token_(token),
      tls_(tls),
      most_strangers_(std::clamp(free_descriptors() / 4, kFewestStrangers, kMaxStrangers)) {}

Endpoint MeshConnector::listen(const Address& address) {
  const Endpoint wanted(address, 0);
  Failure failure;
  acceptor_.open(wanted.protocol(), failure);
  if (!failure) ::fcntl(acceptor_.native_handle(), F_SETFD, FD_CLOEXEC);
  if (!failure) acceptor_.bind(wanted, failure);
  if (!failure) acceptor_.listen(asio::socket_base::max_listen_connections, failure);
  if (failure) throw SystemError("tcp: can't listen on " + address.to_string() + ": " + failure.message());
  return acceptor_.local_endpoint();
}

bool MeshConnector::Peer::complete() const {
  return std::ranges::all_of(done, [](const Connected& one) { return one.socket != nullptr; });
}

bool MeshConnector::Peer::begun() const {
  return admitted > 0 || std::ranges::any_of(done, [](const Connected& one) { return one.socket != nullptr; });
}

/// A failure of the program itself, such as no memory, ends run() or poll().
void MeshConnector::start(Task<void> task) {
  ++handshakes_;
  asio::co_spawn(context_, std::move(task), [this](std::exception_ptr failure) {
    --handshakes_;
    if (failure == nullptr) return;
    failure_ = failure;
    context_.stop();
  });
}

void MeshConnector::begin(const std::vector<Endpoint>& endpoints) {
  peers_.clear();
  for (const Endpoint& endpoint : endpoints) {
    Peer& peer = peers_.emplace_back();
    peer.endpoint = endpoint;
    peer.done = std::vector<Connected>(streams_);
    peer.reason =
        peers_.size() <= rank_ ? "it has not connected to this rank" : "no answer (does a firewall drop the packets?)";
  }
  to_come_ = (endpoints.size() - 1) * streams_;
  if (to_come_ == 0) return;
  start(accept_ranks());
  --handshakes_;  // accepting is none
}

std::string MeshConnector::run(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit) {
  begin(endpoints);
  if (to_come_ == 0) return "";
  for (std::size_t peer = rank_ + 1; peer < peers_.size(); ++peer) want(peer);
  context_.run_for(limit);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  return to_come_ == 0 ? "" : missing(limit);
}

void MeshConnector::serve(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit) {
  serving_ = true;
  limit_ = limit;
  begin(endpoints);
}

void MeshConnector::want(std::size_t rank) {
  Peer& peer = peers_[rank];
  if (std::exchange(peer.wanted, true) || peer.finished) return;
  peer.since = std::chrono::steady_clock::now();
  if (peer.direction == Direction::none) connect(rank);
}

void MeshConnector::connect(std::size_t rank) {
  peers_[rank].direction = Direction::out;
  const std::uint32_t round = ++peers_[rank].round;
  for (std::size_t stream = 0; stream < streams_; ++stream)
    start(connect_one(
        {static_cast<std::uint32_t>(rank_), static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(stream)},
        round));
}

std::vector<MeshConnector::Outcome> MeshConnector::poll() {
  context_.poll();
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  return std::exchange(news_, {});
}

std::string MeshConnector::missing(std::chrono::milliseconds limit) const {
  std::string text;
  for (std::size_t r = 0; r < peers_.size(); ++r) {
    if (r == rank_ || peers_[r].complete()) continue;
    std::ostringstream where;
    where << peers_[r].endpoint;
    text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + " at " + where.str() + ": " + peers_[r].reason;
  }
  return "tcp: not connected within " + format_duration(limit) + " to " + text +
         " (TESSERA_IFNAME chooses the network interface)";
}

std::vector<MeshConnection> MeshConnector::release(Peer& peer) const {
  std::vector<MeshConnection> all;
  for (Connected& one : peer.done) all.push_back({UniqueFd(one.socket->release()), std::move(one.stream), one.keys});
  return all;
}

std::vector<std::vector<MeshConnection>> MeshConnector::release_streams() {
  std::vector<std::vector<MeshConnection>> all(peers_.size());
  for (std::size_t r = 0; r < peers_.size(); ++r)
    if (r != rank_) all[r] = release(peers_[r]);
  return all;
}

SecureStream MeshConnector::stream_of(Socket& socket, bool server) const {
  Failure ignored;  // then its first use fails
  socket.native_non_blocking(true, ignored);
  if (tls_ == nullptr) return SecureStream(socket.native_handle());
  return {socket.native_handle(), *tls_, tls_secret(token_), server};
}

void MeshConnector::keep(const ConnectionId& link, std::size_t rank, Connected connected) {
  Peer& peer = peers_[rank];
  Connected& place = peer.done[link.stream];
  if (place.socket == nullptr) --to_come_;  // else: the rank missed the answer and has retried
  place = std::move(connected);
  if (serving_ && peer.complete()) {
    peer.finished = true;
    news_.push_back({rank, release(peer), ""});
  }
  if (!serving_ && to_come_ == 0) context_.stop();
}

void MeshConnector::give_up(std::size_t rank) {
  Peer& peer = peers_[rank];
  if (std::exchange(peer.finished, true)) return;
  std::ostringstream where;
  where << peer.endpoint;
  news_.push_back({rank,
                   {},
                   "not connected within " + format_duration(limit_) + " at " + where.str() + ": " + peer.reason +
                       " (TESSERA_IFNAME chooses the network interface)"});
}

MeshConnector::Task<void> MeshConnector::pause(std::chrono::milliseconds time) {
  asio::steady_timer timer(context_, time);
  Failure ignored;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
}

MeshConnector::Task<void> MeshConnector::pause_accepting(std::chrono::milliseconds time) {
  accepts_later_ = true;
  co_await pause(time);
  accepts_later_ = false;
}

/// Closes one at random, so that a flood can't foresee which remain: one whose address is not a rank's, if there is
/// any.
void MeshConnector::drop_stranger() {
  Failure failure;
  std::vector<SharedSocket> others;
  const auto is_rank = [&](const SharedSocket& socket) {
    const Address address = socket->remote_endpoint(failure).address();
    return std::ranges::any_of(peers_, [&](const Peer& one) { return one.endpoint.address() == address; });
  };
  std::remove_copy_if(strangers_.begin(), strangers_.end(), std::back_inserter(others), is_rank);
  if (others.empty()) others.assign(strangers_.begin(), strangers_.end());
  const SharedSocket dropped = others[std::uniform_int_distribution<std::size_t>(0, others.size() - 1)(random_)];
  strangers_.remove(dropped);
  dropped->close(failure);
}

MeshConnector::Task<void> MeshConnector::accept_ranks() {
  for (std::size_t accepted = 0;; ++accepted) {
    if (serving_ && accepted == kAcceptsAtOnce) {
      co_await pause_accepting(kAcceptPause);
      accepted = 0;
    }
    const auto socket = std::make_shared<Socket>(context_);
    Failure failure;
    co_await acceptor_.async_accept(*socket, asio::redirect_error(asio::use_awaitable, failure));
    if (failure) {  // the other side has closed, or too many files are open
      co_await pause_accepting(20ms);
      continue;
    }
    ::fcntl(socket->native_handle(), F_SETFD, FD_CLOEXEC);
    strangers_.push_back(socket);
    if (strangers_.size() > most_strangers_ + (serving_ ? 0 : to_come_)) drop_stranger();
    start(accept_one(socket));
  }
}

/// A rank that connects to this one, while this one connects to it: the lower one's connections are made.
bool MeshConnector::admit(const ConnectionId& link) {
  if (link.to != rank_ || link.from == rank_ || link.from >= peers_.size() || link.stream >= streams_) return false;
  Peer& peer = peers_[link.from];
  if (peer.finished || (!serving_ && link.from > rank_)) return false;
  if (peer.direction == Direction::out && link.from > rank_) return false;
  peer.direction = Direction::in;
  for (const SharedSocket& attempt : peer.attempts) {
    Failure ignored;
    attempt->close(ignored);
  }
  ++peer.admitted;
  return true;
}

void MeshConnector::end_admission(std::size_t rank) {
  Peer& peer = peers_[rank];
  --peer.admitted;
  if (peer.finished || peer.begun()) return;
  peer.direction = Direction::none;
  if (peer.wanted) connect(rank);
}

MeshConnector::Task<void> MeshConnector::accept_one(SharedSocket socket) {
  std::optional<TimeLimit> limit(std::in_place, socket, kStrangersTime);
  std::optional<std::size_t> admitted;
  const Admission admits = [&](const ConnectionId& link) {
    if (!socket->is_open() || !admit(link)) return false;
    admitted = link.from;
    // The rank may use the connection from now on, so that it is not closed any more.
    limit.reset();
    strangers_.remove(socket);
    return true;
  };
  SecureStream stream = stream_of(*socket, true);
  const std::optional<Introduction> peer = co_await welcome(*socket, stream, token_, admits);
  strangers_.remove(socket);
  if (peer && !peers_[*admitted].finished) keep(peer->link, *admitted, {socket, std::move(stream), peer->keys});
  if (admitted) end_admission(*admitted);
}

MeshConnector::Task<void> MeshConnector::connect_one(ConnectionId link, std::uint32_t round) {
  Peer& peer = peers_[link.to];
  const auto goes_on = [&] { return peer.direction == Direction::out && peer.round == round && !peer.finished; };
  for (auto time = 5ms; goes_on(); time = std::min(2 * time, 500ms)) {
    peer.reason = co_await try_to_connect(link);
    if (peer.done[link.stream].socket != nullptr || !goes_on()) co_return;
    if (serving_ && peer.reason != kNoAnswer && std::chrono::steady_clock::now() - peer.since > limit_)
      co_return give_up(link.to);
    co_await pause(time);
  }
}

MeshConnector::Task<std::string> MeshConnector::try_to_connect(ConnectionId link) {
  Peer& peer = peers_[link.to];
  const auto socket = std::make_shared<Socket>(context_);
  Failure failure;
  socket->open(peer.endpoint.protocol(), failure);
  if (failure) co_return failure.message();
  ::fcntl(socket->native_handle(), F_SETFD, FD_CLOEXEC);
  const TimeLimit limit(socket, kAttemptTime);
  const auto attempt = peer.attempts.insert(peer.attempts.end(), socket);
  co_await socket->async_connect(peer.endpoint, asio::redirect_error(asio::use_awaitable, failure));
  std::string refusal = failure == asio::error::operation_aborted ? "no answer" : failure.message();
  if (!failure) {
    Introduction own{.link = link, .keys = {}};
    SecureStream stream = stream_of(*socket, false);
    refusal = co_await introduce(*socket, stream, token_, own);
    if (!socket->is_open())
      refusal = kNoAnswer;  // in time
    else if (refusal.empty())
      keep(link, link.to, {socket, std::move(stream), own.keys});
  }
  peer.attempts.erase(attempt);
  co_return refusal;
}

}  // namespace tessera::comm::tcp
