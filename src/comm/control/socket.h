// Unix stream sockets with deadlines: frames of bytes, and descriptors.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "tessera/comm/bootstrap.h"

namespace tessera::comm {

using Deadline = std::chrono::steady_clock::time_point;

/// A connected socket. Every function throws Timeout at its deadline, PeerLost where the other side is gone,
/// SystemError.
class Connection {
 public:
  Connection() = default;
  explicit Connection(UniqueFd fd) : fd_(std::move(fd)) {}
  int fd() const noexcept { return fd_.get(); }
  explicit operator bool() const noexcept { return static_cast<bool>(fd_); }
  void close() noexcept { fd_.reset(); }

  void send_frame(std::string_view payload, Deadline deadline);
  /// The other side gives up: its next receive throws Timeout with this text.
  void send_refusal(std::string_view text, Deadline deadline) noexcept;
  std::string receive_frame(Deadline deadline);
  void send_descriptor(int fd, Deadline deadline);
  UniqueFd receive_descriptor(Deadline deadline);
  /// Of the process at the other end, as the kernel knows it.
  int peer_pid() const;
  bool peer_is_this_user() const;

 private:
  void send_typed(char type, std::string_view payload, Deadline deadline);
  void send_all(const void* data, std::size_t bytes, Deadline deadline);
  std::string receive_payload(Deadline deadline);
  [[noreturn]] void throw_refusal(Deadline deadline);
  void receive_all(void* data, std::size_t bytes, Deadline deadline);
  UniqueFd fd_;
};

/// Listens on an abstract name. Throws SystemError.
UniqueFd listen_on(const std::string& name);
/// The next connection. Empty at the deadline.
Connection accept_from(int listener, Deadline deadline);
/// Empty where nobody listens.
Connection connect_to(const std::string& name);

}  // namespace tessera::comm
