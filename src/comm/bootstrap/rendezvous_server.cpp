#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <boost/asio/buffer.hpp>
#include <boost/asio/read.hpp>
#include <boost/asio/write.hpp>
#include <cerrno>

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
constexpr std::size_t kMostNoted = 3;
constexpr std::size_t kMostNamed = 16;
constexpr std::size_t kMostStrangers = 256;
constexpr std::size_t kFewestStrangers = 4;
constexpr std::size_t kOwnFiles = 16;  // that a program opens besides

/// Unauthenticated peers may use a part of the descriptors that remain when all ranks have theirs.
std::size_t strangers_at_most(int ranks) {
  const std::size_t needed = static_cast<std::size_t>(ranks) + kOwnFiles;
  const std::size_t free = free_descriptors();
  return std::clamp(free > needed ? (free - needed) / 4 : 0, kFewestStrangers, kMostStrangers);
}

}  // namespace

struct RendezvousServer::PendingPeer {
  explicit PendingPeer(asio::io_context& context) : socket(context) {}
  Socket socket;
  protocol::FrameParser reader{protocol::kLongestHandshake};
  protocol::Challenge challenge;
  Digest instance{};
  Seal seal;
  steady_clock::time_point since = steady_clock::now();
  std::list<GuestPointer>::iterator place;  // among the unauthenticated peers ...
  bool stranger = true;                     // ... while it is one
  int rank = -1;
  bool joined = false;
  bool heard = false;  // has sent its hello
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
  const auto guest = std::make_shared<PendingPeer>(context_);
  error_code error;
  guest->socket.assign(asio::generic::stream_protocol(address.ss_family, 0), fd.get(), error);
  if (error) return;
  fd.release();
  guest->place = strangers_.insert(strangers_.end(), guest);
  if (!sweeping_) sweep();
  guest->challenge.nonce = random_digest();
  guest->challenge.session = session_;
  guest->out = protocol::encode_frame(protocol::Type::challenge, protocol::encode(guest->challenge));
  asio::async_write(guest->socket, asio::buffer(guest->out), [this, guest](const error_code& failed, std::size_t) {
    if (failed) return reject(guest);
    read(guest);
  });
}

void RendezvousServer::read(const GuestPointer& guest) {
  guest->socket.async_read_some(asio::buffer(guest->in), [this, guest](const error_code& error, std::size_t bytes) {
    const auto take = [&](protocol::Type type, std::string_view payload) {
      return type == protocol::Type::hello && !guest->heard && on_hello(guest, payload);
    };
    if (error || !guest->stranger || !guest->reader.feed({guest->in.data(), bytes}, take)) return reject(guest);
    if (!guest->heard) read(guest);
  });
}

bool RendezvousServer::on_hello(const GuestPointer& guest, std::string_view payload) {
  const std::optional<protocol::Hello> hello = protocol::decode_hello(payload);
  if (!hello) return false;
  guest->heard = true;
  guest->instance = hello->instance;
  const GuestPointer before = hello->rank < here_.size() ? here_[hello->rank] : nullptr;
  if (before != nullptr) drop_dead();
  // If this server's answer didn't arrive whole, the rank comes again, perhaps before its disconnection is noticed.
  const bool again = before != nullptr && before->instance == hello->instance;
  const bool taken = !again && before != nullptr && here_[hello->rank] != nullptr;
  const HandshakeVerdict judgement = judge(self_, guest->challenge, *hello, taken, complete_);
  if (judgement.answer.verdict == protocol::Verdict::welcome) {
    if (again) reject(before);
    guest->rank = static_cast<int>(hello->rank);
    guest->seal = seal_of(self_.key, guest->challenge, *hello, true);
    here_[hello->rank] = guest;
    strangers_.erase(guest->place);
    guest->stranger = false;
  } else if (!complete_ && refused_.size() < kMostNoted &&
             std::find(refused_.begin(), refused_.end(), judgement.answer.text) == refused_.end()) {
    refused_.push_back(judgement.answer.text);
  }
  if (judgement.fatal && mismatch_.empty()) mismatch_ = judgement.answer.text;
  guest->out = protocol::encode_frame(protocol::Type::answer, protocol::encode(judgement.answer));
  answer(guest);
  return true;
}

void RendezvousServer::answer(const GuestPointer& guest) {
  asio::async_write(guest->socket, asio::buffer(guest->out), [this, guest](const error_code& error, std::size_t) {
    if (error || guest->rank < 0) return reject(guest);
    await_belief(guest);
  });
}

/// Reads one byte, after which the connection belongs to the world: what follows is not read here.
void RendezvousServer::await_belief(const GuestPointer& guest) {
  asio::async_read(guest->socket, asio::buffer(guest->in, 1), [this, guest](const error_code& error, std::size_t) {
    if (error) return reject(guest);
    if (here_[static_cast<std::size_t>(guest->rank)] != guest) return;
    guest->joined = true;
    ++joined_;
  });
}

void RendezvousServer::reject(GuestPointer guest) {  // by value: it may be the list's own element that is erased

  if (guest->stranger) strangers_.erase(guest->place);
  guest->stranger = false;
  if (guest->rank >= 0 && here_[static_cast<std::size_t>(guest->rank)] == guest) {
    here_[static_cast<std::size_t>(guest->rank)] = nullptr;
    if (guest->joined) --joined_;
  }
  error_code ignored;
  guest->socket.close(ignored);
}

/// Drops ranks that died while others are still missing, so that they can come again.
void RendezvousServer::drop_dead() {
  if (complete_) return;
  std::vector<pollfd> polled;
  for (const GuestPointer& guest : here_)
    polled.push_back({guest == nullptr ? -1 : guest->socket.native_handle(), POLLRDHUP, 0});
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
    if (++count <= kMostNamed) text += (text.empty() ? "" : ", ") + std::to_string(r);
  }
  return count > kMostNamed ? text + " and " + std::to_string(count - kMostNamed) + " more" : text;
}

std::vector<Connection> RendezvousServer::take_links() {
  std::vector<Connection> links;
  for (const GuestPointer& guest : here_) {
    links.emplace_back();
    if (guest == nullptr || !guest->joined) continue;
    error_code error;
    const int fd = guest->socket.release(error);
    if (error) continue;
    links.back() = Connection(UniqueFd(fd));
    links.back().seal(guest->seal);
  }
  return links;
}

void RendezvousServer::give_up(const Error& error) {
  complete_ = true;
  const Deadline deadline = steady_clock::now() + 1s;
  for (Connection& link : take_links())
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
    give_up(error);
    throw error;
  }
  if (joined_ + 1 < self_.size) {
    std::string text =
        "init: of " + std::to_string(self_.size) + " ranks, rank " + missing() + " did not connect " + about_;
    for (std::size_t i = 0; i < refused_.size(); ++i) text += (i == 0 ? "; refused: " : "; ") + printable(refused_[i]);
    const Timeout error(text);
    give_up(error);
    throw error;
  }
  complete_ = true;
  return take_links();
}

}  // namespace tessera::comm
