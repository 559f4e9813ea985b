#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
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
constexpr int kHellos = 2;                  // that a peer sends
constexpr std::size_t kAcceptsAtOnce = 64;  // then connected peers are served first
constexpr std::size_t kMaxNoted = 3;
constexpr std::size_t kMaxNamed = 16;
constexpr std::size_t kMaxPending = 4096;
constexpr std::size_t kFewestPending = 4;
constexpr std::size_t kShares = 2;     // one source may hold one share of the places
constexpr std::size_t kOwnFiles = 16;  // that a program opens besides
// In a complete world, whose ranks need the processor: 32 peers a second at a port, 8 of one source.
constexpr auto kLatePause = 250ms;
constexpr std::size_t kLateAtOnce = 8;
constexpr std::size_t kLateOfSource = 2;

/// Pending peers may use a part of the descriptors that remain when all ranks have theirs.
std::size_t pending_at_most(int ranks) {
  const std::size_t needed = static_cast<std::size_t>(ranks) + kOwnFiles;
  allow_descriptors(needed + 4 * kFewestPending);
  const std::size_t free = free_descriptors();
  return std::clamp(free > needed ? (free - needed) / 4 : 0, kFewestPending, kMaxPending);
}

}  // namespace

struct RendezvousServer::PendingPeer {
  explicit PendingPeer(asio::io_context& context) : socket(context) {}
  Socket socket;
  SecureStream stream;
  bool encrypts = false;  // a TLS session must follow
  protocol::FrameParser reader{protocol::kMaxHandshake};
  protocol::Challenge challenge;
  std::string source;
  Digest instance{};
  Seal seal;
  steady_clock::time_point since = steady_clock::now();
  std::optional<std::size_t> place;  // in pending_[known], during the handshake
  bool known = false;                // has proven that it knows the key, if not in this very handshake
  int hellos = 0;
  int rank = -1;
  bool joined = false;
  std::array<char, 1024> in{};
  std::string out;
};

RendezvousServer::RendezvousServer(asio::io_context& context, std::vector<UniqueFd> listeners, RankIdentity self,
                                   std::string about)
    : context_(context),
      self_(std::move(self)),
      about_(std::move(about)),
      session_(random_digest()),
      most_pending_(pending_at_most(self_.size)),
      sweeper_(context),
      here_(static_cast<std::size_t>(self_.size)) {
  for (UniqueFd& fd : listeners)
    listeners_.push_back({asio::posix::stream_descriptor(context_, fd.release()), asio::steady_timer(context_)});
  for (std::size_t i = 0; i < listeners_.size(); ++i) listen(i);
}

RendezvousServer::~RendezvousServer() { close(); }

void RendezvousServer::close() {
  open_.reset();
  listeners_.clear();
  sweeper_.cancel();
  for (auto& pool : pending_)
    while (!pool.empty()) reject(pool.back());
}

void RendezvousServer::listen(std::size_t listener) {
  listeners_[listener].socket.async_wait(asio::posix::stream_descriptor::wait_read,
                                         while_open([this, listener](const error_code& error) {
                                           if (!error) accept_some(listener);
                                         }));
}

void RendezvousServer::listen_later(std::size_t listener) {
  asio::steady_timer& pause = listeners_[listener].pause;
  pause.expires_after(kLatePause);
  pause.async_wait(while_open([this, listener](const error_code& error) {
    if (!error) listen(listener);
  }));
}

void RendezvousServer::accept_some(std::size_t listener) {
  const std::size_t at_once = complete_ ? kLateAtOnce : std::min(kAcceptsAtOnce, share());
  std::map<std::string, std::size_t> accepted;
  for (std::size_t i = 0; i < at_once; ++i) {
    sockaddr_storage address = {};
    socklen_t length = sizeof(address);
    UniqueFd fd(::accept4(listeners_[listener].socket.native_handle(), reinterpret_cast<sockaddr*>(&address), &length,
                          SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      std::string source = source_of(address);
      if (++accepted[source] <= kLateOfSource || !complete_)
        receive(std::move(fd), std::move(source), address.ss_family);
      continue;
    }
    const bool full = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
    if (!full) break;
    // If none of its own connections can be closed, it retries later instead of at once and forever.
    const auto& pool = pending_[pending_[0].empty() ? 1 : 0];
    if (pool.empty()) return listen_later(listener);
    reject(any_of(pool));
  }
  complete_ && !accepted.empty() ? listen_later(listener) : listen(listener);
}

void RendezvousServer::receive(UniqueFd fd, std::string source, int family) {
  if (family == AF_UNIX && !peer_is_this_user(fd.get())) return;
  make_place(source);
  const auto peer = std::make_shared<PendingPeer>(context_);
  error_code error;
  peer->socket.assign(asio::generic::stream_protocol(family, 0), fd.get(), error);
  if (error) return;
  peer->stream = SecureStream(fd.release());
  peer->encrypts = self_.tls != nullptr && family != AF_UNIX;
  peer->source = std::move(source);
  enter(peer);
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
  if (state == SecureStream::State::done) {
    enter_known(peer);
    return challenge(peer);
  }
  if (SecureStream::must_wait(state)) return when_ready(peer, state, [this, peer] { start_tls(peer); });
  if (const std::string error = peer->stream.tls_error(); !error.empty())
    note_refusal(false, "a process, since " + error +
                            (self_.tls->has_certificates() ? "" : "; use the same TESSERA_TOKEN on all ranks"));
  reject(peer);
}

void RendezvousServer::note_refusal(bool proven, const std::string& text) {
  std::vector<std::string>& refused = refused_[proven ? 0 : 1];
  if (!complete_ && refused.size() < kMaxNoted && std::ranges::find(refused, text) == refused.end())
    refused.push_back(text);
}

void RendezvousServer::when_ready(const PeerPointer& peer, SecureStream::State state, std::function<void()> then) {
  const auto what = state == SecureStream::State::wants_write ? Socket::wait_write : Socket::wait_read;
  peer->socket.async_wait(what, while_open([this, peer, then = std::move(then)](const error_code& error) {
                            if (error) return reject(peer);
                            then();
                          }));
}

void RendezvousServer::send(const PeerPointer& peer, std::function<void()> then) {
  while (!peer->out.empty()) {
    const SecureStream::Moved sent = peer->stream.write({std::as_bytes(std::span(peer->out))});
    peer->out.erase(0, sent.bytes);
    if (SecureStream::must_wait(sent.state))
      return when_ready(peer, sent.state, [this, peer, then = std::move(then)] { send(peer, then); });
    if (sent.state != SecureStream::State::done) return reject(peer);
  }
  then();
}

void RendezvousServer::read(const PeerPointer& peer) {
  const auto on_frame = [&](protocol::Type type, std::string_view payload) {
    return type == protocol::Type::hello && peer->hellos < kHellos && on_hello(peer, payload);
  };
  while (peer->hellos < kHellos) {
    const SecureStream::Moved got = peer->stream.read({std::as_writable_bytes(std::span(peer->in))});
    if (SecureStream::must_wait(got.state)) return when_ready(peer, got.state, [this, peer] { read(peer); });
    if (got.state != SecureStream::State::done || !peer->place ||
        !peer->reader.feed({peer->in.data(), got.bytes}, on_frame))
      return reject(peer);
  }
}

/// A peer that knows the key moves to the places of those, where a flood of others doesn't reach it.
void RendezvousServer::enter_known(const PeerPointer& peer) {
  if (peer->known) return;
  tune(peer->socket.native_handle());
  leave(peer);
  if (pending_[1].size() >= most_pending_) reject(any_of(pending_[1]));
  peer->known = true;
  enter(peer);
}

bool RendezvousServer::on_hello(const PeerPointer& peer, std::string_view payload) {
  const std::optional<protocol::Hello> hello = protocol::decode_hello(payload);
  if (!hello) return false;
  if (++peer->hellos < kHellos) {
    if (knows_key(self_, *hello)) enter_known(peer);
    return true;
  }
  peer->instance = hello->instance;
  const PeerPointer before = peer->known && hello->rank < here_.size() ? here_[hello->rank] : nullptr;
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
    leave(peer);
  } else if (judgement.proven || hello->rank < here_.size()) {
    note_refusal(judgement.proven, judgement.reply.text);
  }
  if (judgement.fatal && mismatch_.empty()) mismatch_ = judgement.reply.text;
  peer->out = protocol::encode_frame(protocol::Type::reply, protocol::encode(judgement.reply));
  send(peer, [this, peer] { peer->rank < 0 ? reject(peer) : await_belief(peer); });
  return true;
}

/// Reads one byte, after which the connection belongs to the world: what follows is not read here.
void RendezvousServer::await_belief(const PeerPointer& peer) {
  const SecureStream::Moved got = peer->stream.read({std::as_writable_bytes(std::span(peer->in)).first(1)});
  if (SecureStream::must_wait(got.state)) return when_ready(peer, got.state, [this, peer] { await_belief(peer); });
  if (got.state != SecureStream::State::done) return reject(peer);
  if (here_[static_cast<std::size_t>(peer->rank)] != peer) return;
  peer->joined = true;
  ++joined_;
}

std::size_t RendezvousServer::share() const noexcept { return std::max<std::size_t>(most_pending_ / kShares, 1); }

const RendezvousServer::PeerPointer& RendezvousServer::any_of(const std::vector<PeerPointer>& pool) {
  return pool[std::uniform_int_distribution<std::size_t>(0, pool.size() - 1)(random_)];
}

/// Drops a peer without proof if one from `source` can't enter: one of that source, if it holds its share.
void RendezvousServer::make_place(const std::string& source) {
  const std::vector<PeerPointer>& pool = pending_[0];
  const auto count = sources_.find(source);
  const bool is_source_full = count != sources_.end() && !source.empty() && count->second >= share();
  if (!is_source_full && pool.size() < most_pending_) return;
  PeerPointer dropped = any_of(pool);
  while (is_source_full && dropped->source != source) dropped = any_of(pool);  // it holds half of the places
  reject(dropped);
}

void RendezvousServer::enter(const PeerPointer& peer) {
  std::vector<PeerPointer>& pool = pending_[peer->known ? 1 : 0];
  peer->place = pool.size();
  pool.push_back(peer);
  if (!peer->known) ++sources_[peer->source];
}

void RendezvousServer::leave(const PeerPointer& peer) {
  if (!peer->place) return;
  std::vector<PeerPointer>& pool = pending_[peer->known ? 1 : 0];
  const std::size_t place = *std::exchange(peer->place, std::nullopt);
  if (place + 1 < pool.size()) {
    pool[place] = pool.back();
    pool[place]->place = place;
  }
  pool.pop_back();
  if (const auto count = sources_.find(peer->source); !peer->known && --count->second == 0) sources_.erase(count);
}

void RendezvousServer::reject(PeerPointer peer) {  // by value: it may be the pool's own element that is erased
  leave(peer);
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
  for (const auto& pool : pending_)
    for (std::size_t i = pool.size(); i-- > 0;)  // from the end, from which reject() fills a place
      if (pool[i]->since < oldest) reject(pool[i]);
  sweeping_ = !pending_[0].empty() || !pending_[1].empty() || !complete_;  // avoids needless wake-ups
  if (!sweeping_) return;
  sweeper_.expires_after(kSweepTime);
  sweeper_.async_wait(while_open([this](const error_code& error) {
    if (!error) sweep();
  }));
}

std::string RendezvousServer::missing(int shift) const {
  std::string text;
  std::size_t count = 0;
  for (std::size_t r = 1; r < here_.size(); ++r) {
    if (here_[r] != nullptr && here_[r]->joined) continue;
    if (++count <= kMaxNamed) text += (text.empty() ? "" : ", ") + std::to_string(static_cast<int>(r) + shift);
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
    for (std::size_t i = 0; i < kAcceptsAtOnce && context_.poll_one() > 0; ++i) {
    }
    const InvalidUsage error("init: " + mismatch_);
    refuse_all(error);
    throw error;
  }
  if (joined_ + 1 < self_.size) {
    std::string text =
        "init: of " + std::to_string(self_.size) + " ranks, rank " + missing() + " did not connect " + about_;
    std::vector<std::string>& refused = refused_[0];
    refused.insert(refused.end(), refused_[1].begin(), refused_[1].end());
    for (std::size_t i = 0; i < std::min(refused.size(), kMaxNoted); ++i)
      text += (i == 0 ? "; refused: " : "; ") + printable(refused[i]);
    const Timeout error(text);
    refuse_all(error);
    throw error;
  }
  complete_ = true;
  return release_links();
}

}  // namespace tessera::comm
