#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <optional>

#include "tessera/base/file.h"
#include "tessera/base/text.h"
#include "tessera/comm/bootstrap/address.h"
#include "tessera/comm/bootstrap/rendezvous_server.h"

namespace tessera::comm {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;
using namespace std::chrono_literals;
using std::chrono::steady_clock;

constexpr auto kHandshakeTime = 5s;
constexpr auto kSweepTime = 500ms;
constexpr int kAcceptsAtOnce = 64;  // then connected peers are served first
constexpr std::size_t kMaxNoted = 3;
constexpr std::size_t kMaxNamed = 16;
constexpr std::size_t kMaxStrangers = 256;
constexpr std::size_t kFewestStrangers = 4;
constexpr std::size_t kOwnFiles = 16;  // that a program opens besides

/// Unauthenticated peers may use a part of the descriptors that remain when all ranks have theirs.
std::size_t strangers_at_most(int ranks) {
  const std::size_t needed = static_cast<std::size_t>(ranks) + kOwnFiles;
  const std::size_t free = free_descriptors();
  return std::clamp(free > needed ? (free - needed) / 4 : 0, kFewestStrangers, kMaxStrangers);
}

}  // namespace

struct RendezvousServer::PendingPeer {
  explicit PendingPeer(asio::io_context& context) : socket(context) {}
  Socket socket;
  SecureStream stream;
  bool encrypts = false;  // a TLS session must follow
  protocol::FrameParser reader{protocol::kMaxHandshake};
  protocol::Challenge challenge;
  Digest instance{};
  Seal seal;
  steady_clock::time_point since = steady_clock::now();
  std::list<PeerPointer>::iterator place;  // among the unauthenticated peers ...
  bool stranger = true;                    // ... while it is one
  int rank = -1;
  bool joined = false;
  bool has_hello = false;  // has sent its hello
  std::array<char, 1024> in{};
  std::string out;
};

RendezvousServer::RendezvousServer(asio::io_context& context, std::vector<UniqueFd> listeners, RankIdentity self,
                                   std::string about)
    : context_(context),
      self_(std::move(self)),
      about_(std::move(about)),
      session_(random_digest()),
      most_strangers_(strangers_at_most(self_.size)),
      sweeper_(context),
      here_(static_cast<std::size_t>(self_.size)) {
  for (UniqueFd& fd : listeners) listeners_.emplace_back(context_, fd.release());
  for (std::size_t i = 0; i < listeners_.size(); ++i) listen(i);
}

RendezvousServer::~RendezvousServer() { close(); }

void RendezvousServer::close() {
  listeners_.clear();
  sweeper_.cancel();
  while (!strangers_.empty()) reject(strangers_.front());
}

void RendezvousServer::listen(std::size_t listener) {
  listeners_[listener].async_wait(asio::posix::stream_descriptor::wait_read, [this, listener](const error_code& error) {
    if (!error) accept_some(listener);
  });
}

void RendezvousServer::accept_some(std::size_t listener) {
  for (int i = 0; i < kAcceptsAtOnce; ++i) {
    UniqueFd fd(::accept4(listeners_[listener].native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      receive(std::move(fd));
      continue;
    }
    const bool full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (!full) break;
    if (!strangers_.empty()) {
      reject(strangers_.front());
      continue;
    }
    // None of its own connections can be closed: retry with the next sweep instead of at once and forever.
    auto pause = std::make_shared<asio::steady_timer>(context_, kSweepTime);
    pause->async_wait([this, listener, pause](const error_code& error) {
      if (!error && listener < listeners_.size()) listen(listener);
    });
    return;
  }
  listen(listener);
}

void RendezvousServer::receive(UniqueFd fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0) return;
  if (address.ss_family == AF_UNIX && !peer_is_this_user(fd.get())) return;
  tune(fd.get());
  if (strangers_.size() >= most_strangers_) reject(strangers_.front());
  const auto peer = std::make_shared<PendingPeer>(context_);
  error_code error;
  peer->socket.assign(asio::generic::stream_protocol(address.ss_family, 0), fd.get(), error);
  if (error) return;
  peer->stream = SecureStream(fd.release());
  peer->encrypts = self_.tls != nullptr && address.ss_family != AF_UNIX;
  peer->place = strangers_.insert(strangers_.end(), peer);
  if (!sweeping_) sweep();
  challenge(peer);
}

void RendezvousServer::challenge(const PeerPointer& peer) {
  const bool first = peer->encrypts && !peer->stream.encrypted();
  peer->challenge.nonce = random_digest();
  peer->challenge.session = first ? Digest{} : session_;
  peer->challenge.tls = static_cast<std::uint8_t>(tls_kind(self_.tls.get()));
  peer->out = protocol::encode_frame(protocol::Type::challenge, protocol::encode(peer->challenge));
  send(peer, [this, peer, first] { first ? choose_tls(peer) : read(peer); });
}

/// The first byte tells whether the other end begins a TLS session. A plain hello is refused, with the reason.
void RendezvousServer::choose_tls(const PeerPointer& peer) {
  when_ready(peer, SecureStream::State::wants_read, [this, peer] {
    constexpr char kHandshake = 22;  // RFC 8446, section 5.1
    char first = 0;
    if (::recv(peer->socket.native_handle(), &first, 1, MSG_PEEK) != 1) return reject(peer);
    if (first != kHandshake) return read(peer);
    peer->stream = SecureStream(peer->socket.native_handle(), *self_.tls, tls_secret(self_.key), true);
    start_tls(peer);
  });
}

void RendezvousServer::start_tls(const PeerPointer& peer) {
  const SecureStream::State state = peer->stream.handshake();
  if (state == SecureStream::State::done) return challenge(peer);
  if (state == SecureStream::State::wants_read || state == SecureStream::State::wants_write)
    return when_ready(peer, state, [this, peer] { start_tls(peer); });
  if (const std::string error = peer->stream.tls_error(); !error.empty())
    note_refusal("a process, since " + error +
                 (self_.tls->has_certificates() ? "" : "; use the same TESSERA_TOKEN on all ranks"));
  reject(peer);
}

void RendezvousServer::note_refusal(const std::string& text) {
  if (!complete_ && refused_.size() < kMaxNoted && std::find(refused_.begin(), refused_.end(), text) == refused_.end())
    refused_.push_back(text);
}

void RendezvousServer::when_ready(const PeerPointer& peer, SecureStream::State state, std::function<void()> then) {
  const auto what = state == SecureStream::State::wants_write ? Socket::wait_write : Socket::wait_read;
  peer->socket.async_wait(what, [this, peer, then = std::move(then)](const error_code& error) {
    if (error) return reject(peer);
    then();
  });
}

void RendezvousServer::send(const PeerPointer& peer, std::function<void()> then) {
  while (!peer->out.empty()) {
    const SecureStream::Moved sent = peer->stream.write({std::as_bytes(std::span(peer->out))});
    peer->out.erase(0, sent.bytes);
    if (sent.state == SecureStream::State::wants_read || sent.state == SecureStream::State::wants_write)
      return when_ready(peer, sent.state, [this, peer, then = std::move(then)] { send(peer, then); });
    if (sent.state != SecureStream::State::done) return reject(peer);
  }
  then();
}

void RendezvousServer::read(const PeerPointer& peer) {
  const auto on_frame = [&](protocol::Type type, std::string_view payload) {
    return type == protocol::Type::hello && !peer->has_hello && on_hello(peer, payload);
  };
  while (!peer->has_hello) {
    const SecureStream::Moved got = peer->stream.read({std::as_writable_bytes(std::span(peer->in))});
    if (got.state == SecureStream::State::wants_read || got.state == SecureStream::State::wants_write)
      return when_ready(peer, got.state, [this, peer] { read(peer); });
    if (got.state != SecureStream::State::done || !peer->stranger ||
        !peer->reader.feed({peer->in.data(), got.bytes}, on_frame))
      return reject(peer);
  }
}

bool RendezvousServer::on_hello(const PeerPointer& peer, std::string_view payload) {
  const std::optional<protocol::Hello> hello = protocol::decode_hello(payload);
  if (!hello) return false;
  peer->has_hello = true;
  peer->instance = hello->instance;
  const PeerPointer before = hello->rank < here_.size() ? here_[hello->rank] : nullptr;
  if (before != nullptr) drop_dead();
  // If this server's answer didn't arrive whole, the rank comes again, perhaps before its disconnection is noticed.
  const bool again = before != nullptr && before->instance == hello->instance;
  const bool taken = !again && before != nullptr && here_[hello->rank] != nullptr;
  const HandshakeVerdict judgement = judge(self_, peer->challenge, *hello, taken, complete_);
  if (judgement.reply.verdict == protocol::Verdict::welcome) {
    if (again) reject(before);
    peer->rank = static_cast<int>(hello->rank);
    peer->seal = seal_of(self_.key, peer->challenge, *hello, true);
    here_[hello->rank] = peer;
    strangers_.erase(peer->place);
    peer->stranger = false;
  } else {
    note_refusal(judgement.reply.text);
  }
  if (judgement.fatal && mismatch_.empty()) mismatch_ = judgement.reply.text;
  peer->out = protocol::encode_frame(protocol::Type::reply, protocol::encode(judgement.reply));
  send(peer, [this, peer] { peer->rank < 0 ? reject(peer) : await_belief(peer); });
  return true;
}

/// Reads one byte, after which the connection belongs to the world: what follows is not read here.
void RendezvousServer::await_belief(const PeerPointer& peer) {
  const SecureStream::Moved got = peer->stream.read({std::as_writable_bytes(std::span(peer->in)).first(1)});
  if (got.state == SecureStream::State::wants_read || got.state == SecureStream::State::wants_write)
    return when_ready(peer, got.state, [this, peer] { await_belief(peer); });
  if (got.state != SecureStream::State::done) return reject(peer);
  if (here_[static_cast<std::size_t>(peer->rank)] != peer) return;
  peer->joined = true;
  ++joined_;
}

void RendezvousServer::reject(PeerPointer peer) {  // by value: it may be the list's own element that is erased

  if (peer->stranger) strangers_.erase(peer->place);
  peer->stranger = false;
  if (peer->rank >= 0 && here_[static_cast<std::size_t>(peer->rank)] == peer) {
    here_[static_cast<std::size_t>(peer->rank)] = nullptr;
    if (peer->joined) --joined_;
  }
  error_code ignored;
  peer->socket.close(ignored);
}

/// Drops ranks that died while others are still missing, so that they can come again.
void RendezvousServer::drop_dead() {
  if (complete_) return;
  std::vector<pollfd> polled;
  for (const PeerPointer& peer : here_)
    polled.push_back({peer == nullptr ? -1 : peer->socket.native_handle(), POLLRDHUP, 0});
  if (::poll(polled.data(), polled.size(), 0) <= 0) return;
  for (std::size_t r = 0; r < polled.size(); ++r)
    if (polled[r].revents != 0 && here_[r] != nullptr) reject(here_[r]);
}

void RendezvousServer::sweep() {
  drop_dead();
  const auto oldest = steady_clock::now() - kHandshakeTime;
  while (!strangers_.empty() && strangers_.front()->since < oldest) reject(strangers_.front());
  sweeping_ = !strangers_.empty() || !complete_;  // avoids needless wake-ups of a running world
  if (!sweeping_) return;
  sweeper_.expires_after(kSweepTime);
  sweeper_.async_wait([this](const error_code& error) {
    if (!error) sweep();
  });
}

std::string RendezvousServer::missing() const {
  std::string text;
  std::size_t count = 0;
  for (std::size_t r = 1; r < here_.size(); ++r) {
    if (here_[r] != nullptr && here_[r]->joined) continue;
    if (++count <= kMaxNamed) text += (text.empty() ? "" : ", ") + std::to_string(r);
  }
  return count > kMaxNamed ? text + " and " + std::to_string(count - kMaxNamed) + " more" : text;
}

std::vector<Connection> RendezvousServer::release_links() {
  std::vector<Connection> links;
  for (const PeerPointer& peer : here_) {
    links.emplace_back();
    if (peer == nullptr || !peer->joined) continue;
    error_code error;
    const int fd = peer->socket.release(error);
    if (error) continue;
    links.back() = Connection(UniqueFd(fd), std::move(peer->stream));
    links.back().seal(peer->seal);
  }
  return links;
}

void RendezvousServer::refuse_all(const Error& error) {
  complete_ = true;
  const Deadline deadline = steady_clock::now() + 1s;
  for (Connection& link : release_links())
    if (link) link.send_refusal(error, deadline);
}

std::vector<Connection> RendezvousServer::accept_all(Deadline deadline) {
  const auto all_here = [&] {
    if (joined_ + 1 == self_.size) drop_dead();  // one may have died while it waited for the last
    return joined_ + 1 == self_.size;
  };
  while (!all_here() && mismatch_.empty() && steady_clock::now() < deadline) context_.run_one_until(deadline);
  if (!mismatch_.empty()) {
    // The rank that doesn't match must still receive the error.
    for (int i = 0; i < kAcceptsAtOnce && context_.poll_one() > 0; ++i) {
    }
    const InvalidUsage error("init: " + mismatch_);
    refuse_all(error);
    throw error;
  }
  if (joined_ + 1 < self_.size) {
    std::string text =
        "init: of " + std::to_string(self_.size) + " ranks, rank " + missing() + " did not connect " + about_;
    for (std::size_t i = 0; i < refused_.size(); ++i) text += (i == 0 ? "; refused: " : "; ") + printable(refused_[i]);
    const Timeout error(text);
    refuse_all(error);
    throw error;
  }
  complete_ = true;
  return release_links();
}

}  // namespace tessera::comm
