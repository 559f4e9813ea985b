#include "tessera/comm/bootstrap/secure_stream.h"

#include <openssl/bio.h>
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
#include <fstream>
#include <iterator>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

constexpr std::size_t kRecord = 16 << 10;               // content of the largest
constexpr std::size_t kRoom = kRecord + (1 << 10);      // for a record with its header and tag
constexpr std::size_t kBatch = std::size_t{128} << 10;  // what one system call moves

/// Whether the kernel encrypts records itself, on the socket that OpenSSL writes to.
bool kernel_has_tls() {
  static const bool has = [] {
    std::ifstream file("/proc/sys/net/ipv4/tcp_available_ulp");
    const std::string all{std::istreambuf_iterator<char>(file), {}};
    return (" " + all).find(" tls") != std::string::npos;
  }();
  return has;
}

/// Records on their way between a session and its socket, where the kernel doesn't encrypt. OpenSSL makes a system call
/// for each record of 16 KiB; these make one for several, and the network's packets are as large as without encryption.
class RecordBuffer {
 public:
  explicit RecordBuffer(int fd) : fd_(fd), in_(kRoom) { out_.reserve(kRoom); }
  RecordBuffer(const RecordBuffer&) = delete;
  RecordBuffer& operator=(const RecordBuffer&) = delete;

  /// A BIO that refers to this buffer; null if OpenSSL can't create it.
  BIO* make_bio() {
    BIO* const bio = method() == nullptr ? nullptr : BIO_new(method());
    if (bio == nullptr) return nullptr;
    BIO_set_data(bio, this);
    BIO_set_init(bio, 1);
    return bio;
  }
  /// Both become larger if there is memory for it: only for a peer that has proven who it is.
  void grow() noexcept {
    try {
      out_.reserve(kBatch);
      in_.resize(kBatch);
    } catch (const std::bad_alloc&) {
    }
  }

  /// Whether the session can write a record without allocating memory.
  bool has_room() const { return out_.capacity() - out_.size() >= kRoom; }
  /// Whether the session can read without the socket.
  bool has_input() const { return taken_ < filled_; }

  /// Sends what the session has written. False: not all of it, and errno says why.
  bool flush() {
    while (sent_ < out_.size()) {
      const ssize_t sent = ::send(fd_, out_.data() + sent_, out_.size() - sent_, MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent < 0) return false;
      sent_ += static_cast<std::size_t>(sent);
    }
    out_.clear();
    sent_ = 0;
    return true;
  }

 private:
  static RecordBuffer& of(BIO* bio) { return *static_cast<RecordBuffer*>(BIO_get_data(bio)); }
  static const BIO_METHOD* method() {
    static const BIO_METHOD* const made = [] {
      BIO_METHOD* const fresh = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "records");
      if (fresh != nullptr) {
        BIO_meth_set_write_ex(fresh, write);
        BIO_meth_set_read_ex(fresh, read);
        BIO_meth_set_ctrl(fresh, control);
      }
      return fresh;
    }();
    return made;
  }
  static int write(BIO* bio, const char* data, std::size_t bytes, std::size_t* written) {
    std::vector<char>& out = of(bio).out_;
    BIO_clear_retry_flags(bio);
    try {
      out.insert(out.end(), data, data + bytes);
    } catch (const std::bad_alloc&) {
      errno = ENOMEM;
      return 0;
    }
    *written = bytes;
    return 1;
  }
  static int read(BIO* bio, char* data, std::size_t bytes, std::size_t* read) {
    RecordBuffer& self = of(bio);
    BIO_clear_retry_flags(bio);
    if (!self.has_input() && !self.receive()) {
      if (!self.ended_ && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) BIO_set_retry_read(bio);
      return 0;
    }
    *read = std::min(bytes, self.filled_ - self.taken_);
    std::memcpy(data, self.in_.data() + self.taken_, *read);
    self.taken_ += *read;
    return 1;
  }
  static long control(BIO* bio, int command, long, void*) {
    if (command == BIO_CTRL_EOF) return of(bio).ended_ ? 1 : 0;
    return command == BIO_CTRL_FLUSH ? 1 : 0;
  }
  bool receive() {
    const ssize_t got = ::recv(fd_, in_.data(), in_.size(), 0);
    taken_ = 0;
    filled_ = got > 0 ? static_cast<std::size_t>(got) : 0;
    ended_ = got == 0;
    if (ended_) errno = 0;
    return got > 0;
  }

  const int fd_;
  std::vector<char> in_, out_;
  std::size_t filled_ = 0, taken_ = 0;  // of in_: received, and read by the session
  std::size_t sent_ = 0;                // of out_
  bool ended_ = false;
};

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
    void operator()(SSL* one) const noexcept { SSL_free(one); }
  };
  std::unique_ptr<SSL, Free> ssl;
  Digest secret{};
  State final = State::done;  // what ended it
  unsigned long reason = 0;   // OpenSSL's
  bool established = false;
  std::array<std::byte, kRecord> record;  // short content, to be one record
  std::optional<RecordBuffer> records;    // none: OpenSSL uses the socket, and the kernel encrypts
  std::size_t held = 0;                   // bytes at the start of the next content whose record is in `records` already
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
  BIO* bio = nullptr;
  if (!kernel_has_tls()) bio = session_->records.emplace(fd).make_bio();
  if (ssl == nullptr || (session_->records ? bio == nullptr : SSL_set_fd(ssl, fd) != 1) ||
      SSL_set_app_data(ssl, &session_->secret) != 1) {
    BIO_free(bio);
    throw SystemError("init: OpenSSL can't begin a TLS session");
  }
  if (bio != nullptr) {
    SSL_set_bio(ssl, bio, bio);
    SSL_set_read_ahead(ssl, 0);  // the buffer reads ahead
  }
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
  if (session_->records) session_->records->flush();  // the alert, if the socket takes it
  return session_->final;
}

/// What the session has written but the socket has not taken must leave before anything else is written.
SecureStream::State SecureStream::flush() noexcept {
  if (!session_->records || session_->records->flush()) return State::done;
  if (errno == EAGAIN || errno == EWOULDBLOCK) return State::wants_write;
  code_ = errno;
  return session_->final = State::failed;
}

SecureStream::State SecureStream::handshake() noexcept {
  if (!encrypted() || session_->established) return State::done;
  if (session_->final != State::done) return session_->final;
  const NoBrokenPipe guard;
  ERR_clear_error();
  errno = 0;
  const int result = SSL_do_handshake(session_->ssl.get());
  const State state = result == 1 ? State::done : judge(result);
  if (session_->final != State::done) return state;
  if (const State sent = flush(); sent != State::done) return sent;
  session_->established = result == 1;
  if (session_->established && session_->records) session_->records->grow();
  return state;
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
  if (session_->final != State::done) return {0, session_->final};
  if (const State state = flush(); state != State::done) return {0, state};
  std::optional<NoBrokenPipe> guard;
  std::optional<RecordBuffer>& records = session_->records;
  if (!records) guard.emplace();
  ERR_clear_error();
  Moved all{std::exchange(session_->held, 0), State::done};  // these have left now
  std::size_t last = 0;                                      // content of the last record
  const auto write_all = [&](std::span<const std::byte> bytes) {
    for (; !bytes.empty() && (!records || records->has_room()); bytes = bytes.subspan(last), all.bytes += last) {
      errno = 0;
      if (const int result = SSL_write_ex(session_->ssl.get(), bytes.data(), bytes.size(), &last); result != 1) {
        all.state = judge(result);
        return false;
      }
    }
    return bytes.empty();
  };
  const std::size_t first = std::min(all.bytes, content[0].size());
  const std::span<const std::byte> begin = content[0].subspan(first), rest = content[1].subspan(all.bytes - first);
  if (!begin.empty() && !rest.empty() && begin.size() < kRecord) {
    // A retry begins with the same bytes, so that it makes the same record.
    std::ranges::copy(begin, session_->record.begin());
    const auto more = rest.first(std::min(rest.size(), kRecord - begin.size()));
    std::ranges::copy(more, session_->record.begin() + static_cast<std::ptrdiff_t>(begin.size()));
    if (write_all(std::span(session_->record).first(begin.size() + more.size()))) write_all(rest.subspan(more.size()));
  } else if (write_all(begin)) {
    write_all(rest);
  }
  if (all.state == State::done && flush() == State::wants_write) {
    // The caller comes again with the last record's content, and thus until all has left.
    session_->held = last;
    all.bytes -= last;
    all.state = State::wants_write;
  }
  if (session_->final != State::done && all.bytes == 0) all.state = session_->final;
  if (all.bytes > 0) all.state = State::done;
  return all;
}

bool SecureStream::has_pending() const noexcept {
  return encrypted() && (session_->final != State::done || SSL_has_pending(session_->ssl.get()) == 1 ||
                         (session_->records && session_->records->has_input()));
}

std::string SecureStream::tls_error() const {
  if (!encrypted() || session_->reason == 0) return "";
  const long verdict = SSL_get_verify_result(session_->ssl.get());
  if (verdict != X509_V_OK)
    return std::string("TLS: its certificate is not accepted: ") + X509_verify_cert_error_string(verdict);
  if (const int alert = ERR_GET_REASON(session_->reason) - SSL_AD_REASON_OFFSET; alert >= 0) {
    const bool of_certificate = (alert >= SSL_AD_BAD_CERTIFICATE && alert <= SSL_AD_CERTIFICATE_UNKNOWN) ||
                                alert == SSL_AD_UNKNOWN_CA || alert == SSL_AD_ACCESS_DENIED;
    return std::string("TLS: it ") +
           (of_certificate ? "refuses this rank's certificate (TESSERA_TLS_CERT): " : "reports: ") +
           SSL_alert_desc_string_long(alert);
  }
  const char* const text = ERR_reason_error_string(session_->reason);
  return std::string("TLS: ") + (text == nullptr ? "the session failed" : text);
}

std::string SecureStream::why() const {
  const std::string error = tls_error();
  if (!error.empty()) return error;
  return code_ == 0 ? "it closed the connection" : std::strerror(code_);
}

}  // namespace tessera::comm
