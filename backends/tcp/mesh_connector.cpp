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

void MeshConnector::start(Task<void> task) {
  asio::co_spawn(context_, std::move(task), [this](std::exception_ptr failure) {
    if (failure == nullptr) return;
    failure_ = failure;
    context_.stop();
  });
}

std::string MeshConnector::run(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit) {
  done_.clear();
  while (done_.size() < endpoints.size()) done_.emplace_back(streams_);
  reasons_.assign(endpoints.size(), "it has not connected to this rank");
  std::fill(reasons_.begin() + static_cast<std::ptrdiff_t>(rank_) + 1, reasons_.end(),
            "no answer (does a firewall drop the packets?)");
  to_come_ = (endpoints.size() - 1) * streams_;
  if (to_come_ == 0) return "";
  start(accept_ranks(endpoints));
  for (std::size_t peer = rank_ + 1; peer < endpoints.size(); ++peer)
    for (std::size_t stream = 0; stream < streams_; ++stream)
      start(connect_one(
          {static_cast<std::uint32_t>(rank_), static_cast<std::uint32_t>(peer), static_cast<std::uint32_t>(stream)},
          endpoints[peer]));
  context_.run_for(limit);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
  return to_come_ == 0 ? "" : missing(endpoints, limit);
}

std::string MeshConnector::missing(const std::vector<Endpoint>& endpoints, std::chrono::milliseconds limit) const {
  std::string text;
  for (std::size_t r = 0; r < endpoints.size(); ++r) {
    const bool complete = std::ranges::all_of(done_[r], [](const Connected& one) { return one.socket != nullptr; });
    if (r == rank_ || complete) continue;
    std::ostringstream where;
    where << endpoints[r];
    text += (text.empty() ? "" : "; ") + ("rank " + std::to_string(r)) + " at " + where.str() + ": " + reasons_[r];
  }
  return "tcp: not connected within " + format_duration(limit) + " to " + text +
         " (TESSERA_IFNAME chooses the network interface)";
}

std::vector<std::vector<MeshConnection>> MeshConnector::release_streams() {
  std::vector<std::vector<MeshConnection>> all(done_.size());
  for (std::size_t r = 0; r < done_.size(); ++r)
    if (r != rank_)
      for (Connected& one : done_[r])
        all[r].push_back({UniqueFd(one.socket->release()), std::move(one.stream), one.keys});
  return all;
}

SecureStream MeshConnector::stream_of(Socket& socket, bool server) const {
  Failure ignored;  // then its first use fails
  socket.native_non_blocking(true, ignored);
  if (tls_ == nullptr) return SecureStream(socket.native_handle());
  return {socket.native_handle(), *tls_, tls_secret(token_), server};
}

void MeshConnector::keep(std::size_t rank, Connected connected, std::size_t stream) {
  Connected& place = done_[rank][stream];
  if (place.socket == nullptr) --to_come_;  // else: the rank missed the answer and has retried
  place = std::move(connected);
  if (to_come_ == 0) context_.stop();
}

MeshConnector::Task<void> MeshConnector::pause(std::chrono::milliseconds time) {
  asio::steady_timer timer(context_, time);
  Failure ignored;
  co_await timer.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
}

/// Closes one at random, so that a flood can't foresee which remain: one whose address is not a rank's, if there is
/// any.
void MeshConnector::drop_stranger(const std::vector<Endpoint>& endpoints) {
  Failure failure;
  std::vector<SharedSocket> others;
  const auto is_rank = [&](const SharedSocket& socket) {
    const Address address = socket->remote_endpoint(failure).address();
    return std::ranges::any_of(endpoints, [&](const Endpoint& one) { return one.address() == address; });
  };
  std::remove_copy_if(strangers_.begin(), strangers_.end(), std::back_inserter(others), is_rank);
  if (others.empty()) others.assign(strangers_.begin(), strangers_.end());
  const SharedSocket dropped = others[std::uniform_int_distribution<std::size_t>(0, others.size() - 1)(random_)];
  strangers_.remove(dropped);
  dropped->close(failure);
}

MeshConnector::Task<void> MeshConnector::accept_ranks(const std::vector<Endpoint>& endpoints) {
  while (true) {
    const auto socket = std::make_shared<Socket>(context_);
    Failure failure;
    co_await acceptor_.async_accept(*socket, asio::redirect_error(asio::use_awaitable, failure));
    if (failure) {  // the other side has closed, or too many files are open
      co_await pause(20ms);
      continue;
    }
    ::fcntl(socket->native_handle(), F_SETFD, FD_CLOEXEC);
    strangers_.push_back(socket);
    if (strangers_.size() > most_strangers_ + to_come_) drop_stranger(endpoints);
    start(accept_one(socket));
  }
}

bool MeshConnector::belongs(const ConnectionId& link) const {
  return link.to == rank_ && link.from < rank_ && link.stream < streams_;
}

MeshConnector::Task<void> MeshConnector::accept_one(SharedSocket socket) {
  const TimeLimit limit(socket, kStrangersTime);
  SecureStream stream = stream_of(*socket, true);
  const std::optional<Introduction> peer = co_await welcome(*socket, stream, token_);
  strangers_.remove(socket);
  if (peer && belongs(peer->link) && socket->is_open())
    keep(peer->link.from, {socket, std::move(stream), peer->keys}, peer->link.stream);
}

MeshConnector::Task<void> MeshConnector::connect_one(ConnectionId link, Endpoint endpoint) {
  for (auto time = 5ms;; time = std::min(2 * time, 500ms)) {
    std::string& reason = reasons_[link.to];
    reason = co_await try_to_connect(link, endpoint);
    if (reason.empty()) co_return;
    co_await pause(time);
  }
}

MeshConnector::Task<std::string> MeshConnector::try_to_connect(ConnectionId link, Endpoint endpoint) {
  const auto socket = std::make_shared<Socket>(context_);
  Failure failure;
  socket->open(endpoint.protocol(), failure);
  if (failure) co_return failure.message();
  ::fcntl(socket->native_handle(), F_SETFD, FD_CLOEXEC);
  const TimeLimit limit(socket, kAttemptTime);
  co_await socket->async_connect(endpoint, asio::redirect_error(asio::use_awaitable, failure));
  if (failure) co_return failure == asio::error::operation_aborted ? "no answer" : failure.message();
  Introduction own{.link = link, .keys = {}};
  SecureStream stream = stream_of(*socket, false);
  std::string refusal = co_await introduce(*socket, stream, token_, own);
  if (refusal.empty()) keep(link.to, {socket, std::move(stream), own.keys}, link.stream);
  co_return refusal;
}

}  // namespace tessera::comm::tcp
