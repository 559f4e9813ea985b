// The bytes of a connection, plain or encrypted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/tls_context.h"

namespace tessera::comm {

/// Reads and writes a connected, non-blocking stream socket, which it doesn't own: plain, with one system call for both
/// buffers, or in a TLS session. Used by one thread at a time. No function throws or waits.
class TESSERA_API SecureStream {
 public:
  enum class State : std::uint8_t {
    done,         ///< some bytes were moved
    wants_read,   ///< nothing was moved: to be repeated when the socket is readable
    wants_write,  ///< ... writable; with the same bytes, and perhaps more
    ended,        ///< the other end has closed the connection
    damaged,      ///< the bytes are not those of the other end
    failed,       ///< why()
  };
  static constexpr bool must_wait(State state) { return state == State::wants_read || state == State::wants_write; }
  struct Moved {
    std::size_t bytes = 0;
    State state = State::done;
  };
  using Room = std::array<std::span<std::byte>, 2>;
  using Content = std::array<std::span<const std::byte>, 2>;

  /// Plain.
  explicit SecureStream(int fd = -1) noexcept;
  /// A session of TLS, which begins with handshake(). `secret`: of both ends, unless they have certificates. `server`:
  /// exactly one end is it. Throws SystemError.
  SecureStream(int fd, const TlsContext& tls, const Digest& secret, bool server);
  SecureStream(SecureStream&&) noexcept;
  SecureStream& operator=(SecureStream&&) noexcept;
  ~SecureStream();

  bool encrypted() const noexcept { return session_ != nullptr; }
  State handshake() noexcept;
  Moved read(const Room& room) noexcept;
  Moved write(const Content& content) noexcept;
  /// Whether read() may return bytes, or an error, though the socket has none.
  bool has_pending() const noexcept;
  /// Why TLS itself ended the session; "" if it did not: the other end may have closed the connection for other
  /// reasons.
  std::string tls_error() const;
  std::string why() const;

 private:
  struct Session;
  Moved read_records(const Room& room) noexcept;
  Moved write_records(const Content& content) noexcept;
  Moved moved(std::ptrdiff_t count, State when_full) noexcept;
  State judge(int result) noexcept;
  State flush() noexcept;

  int fd_ = -1;
  int code_ = 0;                      // errno of a failure
  std::unique_ptr<Session> session_;  // null: plain
};

}  // namespace tessera::comm
