#include <sys/socket.h>

#include <boost/asio/post.hpp>

#include "tessera/comm/bootstrap/control_connection.h"

namespace tessera::comm {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

int family_of(int fd) {
  sockaddr_storage address = {};
  socklen_t length = sizeof(address);
  return ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 ? address.ss_family : AF_UNIX;
}

std::size_t cost_of(const ControlConnection::Message& message) { return sizeof(message) + message.payload.size(); }

}  // namespace

ControlConnection::ControlConnection(asio::io_context& context, Connection connection, Events events)
    : context_(context),
      socket_(context),
      events_(std::move(events)),
      stream_(connection.take_stream()),
      seal_(connection.seal()) {
  socket_.assign(asio::generic::stream_protocol(family_of(connection.fd()), 0), connection.fd());
  connection.release();
}

void ControlConnection::start() {
  asio::post(context_, [this] { read(); });  // setup may have read more than it needed
}

void ControlConnection::when_ready(SecureStream::State state, void (ControlConnection::*then)()) {
  const auto what =
      state == SecureStream::State::wants_write ? asio::socket_base::wait_write : asio::socket_base::wait_read;
  socket_.async_wait(what, [this, then](const error_code& error) {
    if (!socket_.is_open()) return;
    if (error) return break_off();
    (this->*then)();
  });
}

void ControlConnection::read() {
  do {
    if (!socket_.is_open()) return;
    const SecureStream::Moved got = stream_.read({std::as_writable_bytes(std::span(in_))});
    if (SecureStream::must_wait(got.state)) return when_ready(got.state, &ControlConnection::read);
    if (got.state == SecureStream::State::damaged) return events_.damaged();
    if (got.state != SecureStream::State::done) return break_off();
    const SealedReader::Fed fed = reader_.feed({in_.data(), got.bytes}, events_.frame);
    if (fed == SealedReader::Fed::damaged) return events_.damaged();
    if (fed == SealedReader::Fed::refused) return break_off();
  } while (stream_.has_pending());
  if (socket_.is_open()) when_ready(SecureStream::State::wants_read, &ControlConnection::read);
}

void ControlConnection::send(Frame frame) {
  const std::lock_guard lock(mutex_);
  if (deaf_ || finishing_) return;
  if (frame->type == protocol::Type::message && queued_ + cost_of(*frame) > kMaxQueued) return;
  queued_ += cost_of(*frame);
  queue_.push_back(std::move(frame));
  if (writing_) return;
  writing_ = true;
  asio::post(context_, [this] { write_next(); });
}

void ControlConnection::write_next() {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty() || deaf_) {
      writing_ = false;
      if (finishing_) shut_down();
      return;
    }
    out_frame_ = std::move(queue_.front());
    queue_.pop_front();
  }
  out_ = seal_.close(out_frame_->type, out_frame_->payload);
  out_at_ = 0;
  write_rest();
}

void ControlConnection::write_rest() {
  while (out_at_ < out_.size()) {
    if (!socket_.is_open()) return;
    const SecureStream::Moved sent = stream_.write({std::as_bytes(std::span(out_)).subspan(out_at_)});
    out_at_ += sent.bytes;
    if (SecureStream::must_wait(sent.state)) return when_ready(sent.state, &ControlConnection::write_rest);
    if (sent.state != SecureStream::State::done) return break_off();
  }
  {
    const std::lock_guard lock(mutex_);
    queued_ -= cost_of(*out_frame_);
  }
  asio::post(context_, [this] { write_next(); });
}

void ControlConnection::finish() {
  const std::lock_guard lock(mutex_);
  finishing_ = true;
  if (!writing_) shut_down();
}

void ControlConnection::shut_down() {
  error_code ignored;
  if (socket_.is_open()) socket_.shutdown(asio::socket_base::shutdown_send, ignored);
}

void ControlConnection::close() {
  {
    const std::lock_guard lock(mutex_);
    deaf_ = true;
    queue_.clear();
  }
  error_code ignored;
  socket_.close(ignored);
}

void ControlConnection::break_off() {
  close();
  if (std::exchange(reported_, true)) return;
  events_.broken();
}

}  // namespace tessera::comm
