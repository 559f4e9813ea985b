// A connected stream socket with deadlines, for frames and descriptors. Used for blocking communication during setup.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/protocol.h"
#include "tessera/comm/bootstrap/secure_stream.h"

namespace tessera::comm {

using Deadline = std::chrono::steady_clock::time_point;

/// The received data is not what was sent, whether by damage or by manipulation.
class Damaged : public BackendError {
 public:
  using BackendError::BackendError;
};

/// Every function throws Timeout at its deadline, PeerLost if the peer is gone, SystemError, Damaged if the connection
/// is sealed, and the error with which the peer refused. Reads nothing beyond the requested frame.
class TESSERA_API Connection {
 public:
  Connection() = default;
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)), stream_(fd_.get()) {}
  /// `stream`: of `fd`.
  Connection(UniqueFd fd, SecureStream stream) : fd_(std::move(fd)), stream_(std::move(stream)) {}
  int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }
  void close() noexcept { fd_.reset(); }
  int release() noexcept { return fd_.release(); }
  /// For the new owner of the descriptor.
  SecureStream take_stream() noexcept { return std::move(stream_); }
  /// Begins a TLS session as its client, which encrypts all that follows.
  void start_tls(const TlsContext& tls, const Digest& secret, Deadline deadline);
  /// SecureStream's.
  std::string tls_error() const { return stream_.tls_error(); }
  /// Seals all later frames.
  void seal(Seal seal) noexcept { seal_ = seal; }
  const Seal& seal() const noexcept { return seal_; }

  void send_frame(std::string_view payload, Deadline deadline, protocol::Type type = protocol::Type::data);
  /// Sends one byte without meaning. False: the peer is gone or doesn't read.
  bool send_byte(Deadline deadline) noexcept;
  /// Makes the peer's next receive throw this error.
  void send_refusal(const Error& error, Deadline deadline) noexcept;
  std::string receive_frame(Deadline deadline, protocol::Type type = protocol::Type::data,
                            std::size_t longest = protocol::kMaxExchange);
  /// Unix sockets only. Sends descriptors of several ranks in one message: `counts[i]` of the i-th of them, and not
  /// more than kMaxDescriptors together.
  void send_descriptors(std::span<const int> fds, std::string_view counts, Deadline deadline);
  /// Receives those of as many ranks as `counts` has places, which become what was sent.
  std::vector<UniqueFd> receive_descriptors(std::string& counts, Deadline deadline);
  static constexpr std::size_t kMaxDescriptors = 253;  ///< of one message; the kernel's limit

 private:
  void send_all(const void* data, std::size_t bytes, Deadline deadline);
  std::string receive_bytes(std::size_t count, Deadline deadline);
  /// Waits until the stream can continue.
  void await(SecureStream::State state, Deadline deadline) const;
  /// Receives the rest of the frame that begins with `begun`, whose type must be `type`.
  std::string receive_rest(std::string begun, Deadline deadline, protocol::Type type, std::size_t longest);
  UniqueFd fd_;
  SecureStream stream_;
  Seal seal_;
};

/// Waits until `fd` has one of `events` (of poll). False: the deadline passed.
bool wait_ready(int fd, short events, Deadline deadline);

/// Listens on an abstract name. Throws SystemError.
UniqueFd listen_on(const std::string& name);
/// Returns an empty connection if no process of this user listens.
Connection connect_to(const std::string& name);
/// Whether a process of this network namespace listens on an abstract name.
bool is_listened_on(const std::string& name);
/// Whether the process at the other end of a Unix socket runs as this user, according to the kernel.
bool peer_is_this_user(int fd);

}  // namespace tessera::comm
