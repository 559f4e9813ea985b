#include "tessera/comm/control/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr char kData = 'd';
constexpr char kRefusal = 'r';
constexpr std::uint32_t kLongestFrame = 1 << 20;

/// False at the deadline.
bool ready(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd entry{fd, events, 0};
    const int n = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) throw system_error("init: poll");
    if (left <= 0) return false;
  }
}

void wait_ready(int fd, short events, Deadline deadline) {
  if (!ready(fd, events, deadline)) throw Timeout("init: another rank did not answer in time");
}

std::pair<sockaddr_un, socklen_t> abstract_address(const std::string& name) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (name.size() + 1 > sizeof(address.sun_path)) throw SystemError("init: socket name '" + name + "' is too long");
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // a leading zero byte: not in the file system
  return {address, static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size())};
}

UniqueFd make_socket() {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw system_error("init: socket");
  return fd;
}

bool again() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

[[noreturn]] void lost() { throw PeerLost("init: another rank closed its connection while the world was set up"); }

}  // namespace

void Connection::send_all(const void* data, std::size_t bytes, Deadline deadline) {
  const auto* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::send(fd_.get(), at, bytes, MSG_NOSIGNAL);
    if (n < 0 && again()) {
      wait_ready(fd_.get(), POLLOUT, deadline);
      continue;
    }
    if (n < 0) lost();
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void Connection::receive_all(void* data, std::size_t bytes, Deadline deadline) {
  auto* at = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::recv(fd_.get(), at, bytes, 0);
    if (n < 0 && again()) {
      wait_ready(fd_.get(), POLLIN, deadline);
      continue;
    }
    if (n <= 0) lost();
    at += n;
    bytes -= static_cast<std::size_t>(n);
  }
}

void Connection::send_typed(char type, std::string_view payload, Deadline deadline) {
  const auto length = static_cast<std::uint32_t>(payload.size());
  std::array<char, 5> head = {type};
  std::memcpy(head.data() + 1, &length, sizeof(length));
  send_all(head.data(), head.size(), deadline);
  send_all(payload.data(), payload.size(), deadline);
}

void Connection::send_frame(std::string_view payload, Deadline deadline) { send_typed(kData, payload, deadline); }

void Connection::send_refusal(std::string_view text, Deadline deadline) noexcept {
  try {
    send_typed(kRefusal, text, deadline);
  } catch (const Error&) {  // it has gone itself
  }
}

std::string Connection::receive_payload(Deadline deadline) {
  std::uint32_t length = 0;
  receive_all(&length, sizeof(length), deadline);
  if (length > kLongestFrame)
    throw SystemError("init: a frame of " + std::to_string(length) + " bytes is none of ours");
  std::string payload(length, '\0');
  receive_all(payload.data(), payload.size(), deadline);
  return payload;
}

void Connection::throw_refusal(Deadline deadline) { throw Timeout(receive_payload(deadline)); }

std::string Connection::receive_frame(Deadline deadline) {
  char type = 0;
  receive_all(&type, 1, deadline);
  if (type == kRefusal) throw_refusal(deadline);
  return receive_payload(deadline);
}

void Connection::send_descriptor(int fd, Deadline deadline) {
  char byte = 'f';
  iovec data{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  while (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) != 1) {
    if (!again()) lost();
    wait_ready(fd_.get(), POLLOUT, deadline);
  }
}

UniqueFd Connection::receive_descriptor(Deadline deadline) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message = {};
  while (true) {
    message = {};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    const ssize_t n = ::recvmsg(fd_.get(), &message, MSG_CMSG_CLOEXEC);
    if (n == 1) break;
    if (n == 0 || !again()) lost();
    wait_ready(fd_.get(), POLLIN, deadline);
  }
  if (byte == kRefusal) throw_refusal(deadline);
  const cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header == nullptr || header->cmsg_type != SCM_RIGHTS)
    throw SystemError("init: no descriptor came; is the limit of open files (ulimit -n) reached?");
  int fd = -1;
  std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
  return UniqueFd(fd);
}

int Connection::peer_pid() const {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 ? credentials.pid : -1;
}

bool Connection::peer_is_this_user() const {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(fd_.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::geteuid();
}

UniqueFd listen_on(const std::string& name) {
  UniqueFd fd = make_socket();
  const auto [address, length] = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) throw system_error("init: bind");
  if (::listen(fd.get(), SOMAXCONN) != 0) throw system_error("init: listen");
  return fd;
}

Connection accept_from(int listener, Deadline deadline) {
  while (ready(listener, POLLIN, deadline)) {
    UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) return Connection(std::move(fd));
    if (!again() && errno != ECONNABORTED) throw system_error("init: accept");
  }
  return {};
}

Connection connect_to(const std::string& name) {
  UniqueFd fd = make_socket();
  const auto [address, length] = abstract_address(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0) return Connection(std::move(fd));
  if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return {};
  throw system_error("init: connect");
}

}  // namespace tessera::comm
