#include "tessera/comm/bootstrap/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <thread>

#include "tessera/base/text.h"

namespace tessera::comm {
namespace {

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

constexpr char kDescriptors = 'f';  ///< first byte of a message with descriptors; no protocol::Type
using ControlData = std::array<char, CMSG_SPACE(sizeof(int) * Connection::kMaxDescriptors)>;

[[noreturn]] void late() { throw Timeout("init: another rank did not answer in time"); }

bool again() { return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR; }

[[noreturn]] void throw_damaged() { throw Damaged("init: a message from another rank is damaged or forged"); }

/// Throws the error with which the peer refused. The peer is authenticated; its text is made printable all the same.
[[noreturn]] void throw_refusal(const std::string& payload) {
  const std::size_t end = payload.find('\n');
  const std::string kind = payload.substr(0, end);
  throw_error(kind, end == std::string::npos ? "init: another rank failed" : printable(payload.substr(end + 1)));
}

[[noreturn]] void lost() { throw PeerLost("init: another rank closed its connection while the world was set up"); }

}  // namespace

bool wait_ready(int fd, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
    pollfd entry{fd, events, 0};
    const int n = ::poll(&entry, 1, static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) throw system_error("init: poll");
    if (left <= 0) return false;
  }
}

void Connection::await(SecureStream::State state, Deadline deadline) const {
  if (state == SecureStream::State::damaged) throw_damaged();
  if (!SecureStream::must_wait(state)) lost();
  if (!wait_ready(fd_.get(), state == SecureStream::State::wants_read ? POLLIN : POLLOUT, deadline)) late();
}

void Connection::start_tls(const TlsContext& tls, const Digest& secret, Deadline deadline) {
  stream_ = SecureStream(fd_.get(), tls, secret, false);
  for (auto state = stream_.handshake(); state != SecureStream::State::done; state = stream_.handshake())
    await(state, deadline);
}

void Connection::send_all(const void* data, std::size_t bytes, Deadline deadline) {
  std::span<const std::byte> rest(static_cast<const std::byte*>(data), bytes);
  while (!rest.empty()) {
    const SecureStream::Moved sent = stream_.write({rest});
    if (sent.state != SecureStream::State::done) await(sent.state, deadline);
    rest = rest.subspan(sent.bytes);
  }
}

std::string Connection::receive_bytes(std::size_t count, Deadline deadline) {
  std::string bytes;
  for (std::size_t have = 0; have < count;) {
    bytes.resize(std::min(count, have + protocol::kMaxExchange));  // a forged length takes no memory by itself
    const SecureStream::Moved received = stream_.read({std::as_writable_bytes(std::span(bytes)).subspan(have)});
    if (received.state != SecureStream::State::done) await(received.state, deadline);
    have += received.bytes;
  }
  return bytes;
}

void Connection::send_frame(std::string_view payload, Deadline deadline, protocol::Type type) {
  if (payload.size() > std::numeric_limits<std::uint32_t>::max())
    throw SystemError("init: a message of " + std::to_string(payload.size()) + " bytes is too long");
  const std::string bytes = seal_ ? seal_.close(type, payload) : protocol::encode_frame(type, payload);
  send_all(bytes.data(), bytes.size(), deadline);
}

bool Connection::send_byte(Deadline deadline) noexcept {
  try {
    send_all("+", 1, deadline);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void Connection::send_refusal(const Error& error, Deadline deadline) noexcept {
  try {
    send_frame(std::string(error.kind()) + "\n" + error.what(), deadline, protocol::Type::refusal);
  } catch (const Error&) {  // the peer is gone too
  }
}

std::string Connection::receive_rest(std::string begun, Deadline deadline, protocol::Type type, std::size_t longest) {
  const std::size_t head_bytes = seal_ ? Seal::kHeadBytes : protocol::kHeadBytes;
  const std::string bytes = begun + receive_bytes(head_bytes - begun.size(), deadline);
  const auto head = seal_ ? Seal::open_head(bytes, longest) : protocol::decode_head(bytes, longest);
  if (!head && seal_) throw_damaged();
  if (!head || (head->type != type && head->type != protocol::Type::refusal))
    throw SystemError("init: another rank sent a message of unknown type");
  std::string payload = receive_bytes(head->length, deadline);
  if (seal_ && !seal_.open(bytes, payload, receive_bytes(Seal::kProofBytes, deadline))) throw_damaged();
  if (head->type == protocol::Type::refusal) throw_refusal(payload);
  return payload;
}

std::string Connection::receive_frame(Deadline deadline, protocol::Type type, std::size_t longest) {
  return receive_rest("", deadline, type, longest);
}

void Connection::send_descriptors(std::span<const int> fds, std::string_view counts, Deadline deadline) {
  std::string bytes = kDescriptors + std::string(counts);
  iovec data{bytes.data(), bytes.size()};
  alignas(cmsghdr) ControlData control{};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  while (::sendmsg(fd_.get(), &message, MSG_NOSIGNAL) < 0) {  // so few bytes are sent whole
    // Too many descriptors of this user are on their way: their receivers have yet to take them.
    const bool crowded = errno == ETOOMANYREFS;
    if (!crowded && !again()) lost();
    if (crowded) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (crowded ? std::chrono::steady_clock::now() >= deadline : !wait_ready(fd_.get(), POLLOUT, deadline)) late();
  }
}

std::vector<UniqueFd> Connection::receive_descriptors(std::string& counts, Deadline deadline) {
  char byte = 0;
  iovec data{&byte, 1};
  alignas(cmsghdr) ControlData control{};
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
    if (!wait_ready(fd_.get(), POLLIN, deadline)) late();
  }
  std::vector<UniqueFd> fds;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr && header->cmsg_type == SCM_RIGHTS) {
    std::vector<int> numbers((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(numbers.data(), CMSG_DATA(header), numbers.size() * sizeof(int));
    for (const int fd : numbers) fds.emplace_back(fd);
  }
  if (byte != kDescriptors)
    receive_rest(std::string(1, byte), deadline, protocol::Type::refusal, protocol::kMaxExchange);
  counts = receive_bytes(counts.size(), deadline);
  std::size_t announced = 0;
  for (const char count : counts) announced += static_cast<std::uint8_t>(count);
  if (fds.size() != announced)
    throw SystemError("init: " + std::to_string(fds.size()) + " of " + std::to_string(announced) +
                      " descriptors were received; raise the limit of open files (ulimit -n)");
  return fds;
}

bool peer_is_this_user(int fd) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == ::geteuid();
}

UniqueFd listen_on(const std::string& name) {
  UniqueFd fd = make_socket();
  const auto [address, length] = abstract_address(name);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) throw system_error("init: bind");
  if (::listen(fd.get(), SOMAXCONN) != 0) throw system_error("init: listen");
  return fd;
}

Connection connect_to(const std::string& name) {
  UniqueFd fd = make_socket();
  const auto [address, length] = abstract_address(name);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0)
    return peer_is_this_user(fd.get()) ? Connection(std::move(fd)) : Connection();
  if (errno == ECONNREFUSED || errno == EAGAIN || errno == EINTR) return {};
  throw system_error("init: connect");
}

bool is_listened_on(const std::string& name) {
  const UniqueFd fd = make_socket();
  const auto [address, length] = abstract_address(name);
  return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0 ||
         errno == EAGAIN;  // so many processes have asked
}

}  // namespace tessera::comm
