// A connected stream socket with deadlines: frames of bytes, and descriptors. What blocks while the world is set up.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/protocol.h"
#include "tessera/comm/bootstrap/seal.h"

namespace tessera::comm {

using Deadline = std::chrono::steady_clock::time_point;

/// What came is not what was sent, whoever changed it.
class Damaged : public BackendError {
 public:
  using BackendError::BackendError;
};

/// Every function throws Timeout at its deadline, PeerLost where the other side is gone, SystemError; Damaged once it
/// is sealed; and what the other side refused with. Reads nothing beyond the frame that was asked for.
class Connection {
 public:
  Connection() = default;
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)) {}
  int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }
  void close() noexcept { fd_.reset(); }
  int release() noexcept { return fd_.release(); }
  /// From now on frames are sealed.
  void seal(Seal seal) noexcept { seal_ = seal; }
  const Seal& seal() const noexcept { return seal_; }

  void send_frame(std::string_view payload, Deadline deadline, protocol::Type type = protocol::Type::data);
  /// One byte of no meaning. False: the other side has gone, or reads nothing.
  bool send_byte(Deadline deadline) noexcept;
  /// The other side's next receive throws this.
  void send_refusal(const Error& error, Deadline deadline) noexcept;
  std::string receive_frame(Deadline deadline, protocol::Type type = protocol::Type::data,
                            std::size_t longest = protocol::kLongestExchange);
  /// Unix sockets only.
  void send_descriptor(int fd, Deadline deadline);
  UniqueFd receive_descriptor(Deadline deadline);

 private:
  void send_all(const void* data, std::size_t bytes, Deadline deadline);
  std::string receive_bytes(std::size_t count, Deadline deadline);
  /// The payload of the frame that begins with `begun`, of which the type must be `type`.
  std::string receive_rest(std::string begun, Deadline deadline, protocol::Type type, std::size_t longest);
  UniqueFd fd_;
  Seal seal_;
};

/// Waits until `fd` has one of `events` (of poll). False at the deadline.
bool wait_ready(int fd, short events, Deadline deadline);

/// Listens on an abstract name. Throws SystemError.
UniqueFd listen_on(const std::string& name);
/// Empty where nobody listens.
Connection connect_to(const std::string& name);
/// The process at the other end of a Unix socket runs as this user, as the kernel knows.
bool peer_is_this_user(int fd);

}  // namespace tessera::comm
