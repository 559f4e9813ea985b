#include <sys/socket.h>

#include <boost/asio/buffer.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/write.hpp>

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
    : context_(context), socket_(context), events_(std::move(events)), seal_(connection.seal()) {
  socket_.assign(asio::generic::stream_protocol(family_of(connection.fd()), 0), connection.fd());
  connection.release();
}

void ControlConnection::start() { read(); }

void ControlConnection::read() {
  socket_.async_read_some(asio::buffer(in_), [this](const error_code& error, std::size_t bytes) {
    if (!socket_.is_open()) return;
    if (error) return break_off();
    const SealedReader::Fed fed = reader_.feed({in_.data(), bytes}, events_.frame);
    if (fed == SealedReader::Fed::damaged) return events_.damaged();
    if (fed == SealedReader::Fed::refused) return break_off();
    if (socket_.is_open()) read();
  });
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
  Frame frame;
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty() || deaf_) {
      writing_ = false;
      if (finishing_) shut_down();
      return;
    }
    frame = std::move(queue_.front());
    queue_.pop_front();
  }
  out_ = seal_.close(frame->type, frame->payload);
  asio::async_write(socket_, asio::buffer(out_), [this, frame](const error_code& error, std::size_t) {
    if (!socket_.is_open()) return;
    if (error) return break_off();
    {
      const std::lock_guard lock(mutex_);
      queued_ -= cost_of(*frame);
    }
    write_next();
  });
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
