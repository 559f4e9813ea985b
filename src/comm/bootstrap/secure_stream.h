// The bytes of a connection, plain or encrypted by TLS 1.3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap/hmac.h"

struct ssl_ctx_st;

namespace tessera::comm {

/// What all TLS sessions of a rank have in common. The ends of a session authenticate each other by a secret that both
/// know, or by certificates.
class TESSERA_API TlsContext {
 public:
  /// PEM files; all empty: a secret.
  struct Files {
    std::string certificate;  ///< TESSERA_TLS_CERT: this rank's, then those that lead to the authority's
    std::string key;          ///< TESSERA_TLS_KEY: its private key
    std::string authorities;  ///< TESSERA_TLS_CA: whose certificates are accepted
  };
  /// Throws InvalidUsage that names the variable and the file, SystemError.
  explicit TlsContext(const Files& files);

  bool has_certificates() const noexcept { return certificates_; }
  ssl_ctx_st* get() const noexcept { return context_.get(); }

 private:
  struct Free {
    void operator()(ssl_ctx_st* context) const noexcept;
  };
  std::unique_ptr<ssl_ctx_st, Free> context_;
  const bool certificates_;
};

/// By TESSERA_TLS and its files; null: TLS is off. Throws as the constructor.
std::shared_ptr<const TlsContext> tls_from_environment();

/// "TESSERA_TLS=0", "TESSERA_TLS=1 with the token", "... with certificates", by kind: see tls_kind().
std::string describe_tls(unsigned kind);
/// How this rank's connections are protected, as ranks tell each other: 0 without TLS, else by a secret or
/// certificates.
unsigned tls_kind(const TlsContext* tls);

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
