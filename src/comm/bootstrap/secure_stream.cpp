#include "tessera/comm/bootstrap/secure_stream.h"

#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509_vfy.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kRecord = 16 << 10;  // the largest

/// OpenSSL writes without MSG_NOSIGNAL: while this lives, a closed connection sends this thread no signal.
class NoBrokenPipe {
 public:
  NoBrokenPipe() noexcept {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    sigset_t pending;
    was_pending_ = ::sigpending(&pending) == 0 && sigismember(&pending, SIGPIPE) == 1;
    ::pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  ~NoBrokenPipe() {
    const timespec now{};
    const int code = errno;
    if (!was_pending_) ::sigtimedwait(&pipe_, nullptr, &now);
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    errno = code;
  }
  NoBrokenPipe(const NoBrokenPipe&) = delete;
  NoBrokenPipe& operator=(const NoBrokenPipe&) = delete;

 private:
  sigset_t pipe_, before_;
  bool was_pending_;
};

}  // namespace

struct SecureStream::Session {
  struct Free {
    void operator()(SSL* ssl) const noexcept { SSL_free(ssl); }
  };
  std::unique_ptr<SSL, Free> ssl;
  Digest secret{};
  State final = State::done;  // what ended it
  unsigned long reason = 0;   // OpenSSL's
  bool established = false;
  std::array<std::byte, kRecord> record;  // short content, to be one record
};

SecureStream::SecureStream(int fd) noexcept : fd_(fd) {}
SecureStream::SecureStream(SecureStream&&) noexcept = default;
SecureStream& SecureStream::operator=(SecureStream&&) noexcept = default;
SecureStream::~SecureStream() = default;

SecureStream::SecureStream(int fd, const TlsContext& tls, const Digest& secret, bool server)
    : fd_(fd), session_(std::make_unique<Session>()) {
  session_->ssl.reset(SSL_new(tls.get()));
  session_->secret = secret;
  SSL* const ssl = session_->ssl.get();
  if (ssl == nullptr || SSL_set_fd(ssl, fd) != 1 || SSL_set_app_data(ssl, &session_->secret) != 1)
    throw SystemError("init: OpenSSL can't begin a TLS session");
  server ? SSL_set_accept_state(ssl) : SSL_set_connect_state(ssl);
}

/// After a call of OpenSSL that moved nothing.
SecureStream::State SecureStream::judge(int result) noexcept {
  const int code = errno;
  const int kind = SSL_get_error(session_->ssl.get(), result);
  if (kind == SSL_ERROR_WANT_READ) return State::wants_read;
  if (kind == SSL_ERROR_WANT_WRITE) return State::wants_write;
  session_->final = State::failed;
  if (kind == SSL_ERROR_ZERO_RETURN || (kind == SSL_ERROR_SYSCALL && code == 0)) session_->final = State::ended;
  if (kind == SSL_ERROR_SYSCALL) code_ = code;
  if (kind == SSL_ERROR_SSL) {
    session_->reason = ERR_peek_error();
    // Alerts are reports of the other end; all other errors are of bytes that it did not send.
    const bool alert = ERR_GET_REASON(session_->reason) >= SSL_AD_REASON_OFFSET;
    if (session_->established && !alert) session_->final = State::damaged;
  }
  ERR_clear_error();
  return session_->final;
}

SecureStream::State SecureStream::handshake() noexcept {
  if (!encrypted() || session_->established) return State::done;
  if (session_->final != State::done) return session_->final;
  const NoBrokenPipe guard;
  ERR_clear_error();
  errno = 0;
  const int result = SSL_do_handshake(session_->ssl.get());
  session_->established = result == 1;
  return result == 1 ? State::done : judge(result);
}

SecureStream::Moved SecureStream::moved(std::ptrdiff_t count, State when_full) noexcept {
  if (count > 0) return {static_cast<std::size_t>(count), State::done};
  if (count == 0) return {0, State::ended};
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {0, when_full};
  code_ = errno;
  return {0, State::failed};
}

SecureStream::Moved SecureStream::read(const Room& room) noexcept {
  if (encrypted()) return read_records(room);
  std::array<iovec, 2> parts{{{room[0].data(), room[0].size()}, {room[1].data(), room[1].size()}}};
  return moved(::readv(fd_, parts.data(), 2), State::wants_read);
}

SecureStream::Moved SecureStream::write(const Content& content) noexcept {
  if (encrypted()) return write_records(content);
  std::array<iovec, 2> parts;
  for (std::size_t i = 0; i < 2; ++i)
    parts[i] = {const_cast<std::byte*>(content[i].data()), content[i].size()};  // it is only read
  msghdr message = {};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  return moved(::sendmsg(fd_, &message, MSG_NOSIGNAL), State::wants_write);
}

SecureStream::Moved SecureStream::read_records(const Room& room) noexcept {
  Moved all{0, session_->final};
  if (all.state != State::done) return all;
  ERR_clear_error();
  for (const std::span<std::byte> part : room)
    for (std::size_t at = 0; at < part.size();) {
      std::size_t bytes = 0;
      errno = 0;
      if (const int result = SSL_read_ex(session_->ssl.get(), part.data() + at, part.size() - at, &bytes);
          result != 1) {
        const State state = judge(result);  // reported again by the next call
        return all.bytes > 0 ? all : Moved{0, state};
      }
      at += bytes;
      all.bytes += bytes;
    }
  return all;
}

SecureStream::Moved SecureStream::write_records(const Content& content) noexcept {
  Moved all{0, session_->final};
  if (all.state != State::done) return all;
  const NoBrokenPipe guard;
  ERR_clear_error();
  const auto write_all = [&](std::span<const std::byte> bytes) {
    for (std::size_t written = 0; !bytes.empty(); bytes = bytes.subspan(written), all.bytes += written) {
      errno = 0;
      if (const int result = SSL_write_ex(session_->ssl.get(), bytes.data(), bytes.size(), &written); result != 1) {
        all.state = judge(result);
        return false;
      }
    }
    return true;
  };
  std::span<const std::byte> rest = content[1];
  if (!content[0].empty() && !rest.empty() && content[0].size() < kRecord) {
    // A retry begins with the same bytes, so that it makes the same record.
    std::copy(content[0].begin(), content[0].end(), session_->record.begin());
    const auto more = rest.first(std::min(rest.size(), kRecord - content[0].size()));
    std::copy(more.begin(), more.end(), session_->record.begin() + static_cast<std::ptrdiff_t>(content[0].size()));
    if (write_all(std::span(session_->record).first(content[0].size() + more.size()))) {
      write_all(rest.subspan(more.size()));
    }
  } else if (write_all(content[0])) {
    write_all(rest);
  }
  if (all.bytes > 0) all.state = State::done;
  return all;
}

bool SecureStream::has_pending() const noexcept {
  return encrypted() && (session_->final != State::done || SSL_has_pending(session_->ssl.get()) == 1);
}

std::string SecureStream::tls_error() const {
  if (!encrypted() || session_->reason == 0) return "";
  const long verdict = SSL_get_verify_result(session_->ssl.get());
  if (verdict != X509_V_OK)
    return std::string("TLS: its certificate is not accepted: ") + X509_verify_cert_error_string(verdict);
  const char* const text = ERR_reason_error_string(session_->reason);
  return std::string("TLS: ") + (text == nullptr ? "the session failed" : text);
}

std::string SecureStream::why() const {
  const std::string error = tls_error();
  if (!error.empty()) return error;
  return code_ == 0 ? "it closed the connection" : std::strerror(code_);
}

}  // namespace tessera::comm
