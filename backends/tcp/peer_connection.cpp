#include "backends/tcp/peer_connection.h"

#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>

#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

namespace asio = boost::asio;
using Failure = boost::system::error_code;

/// Bytes that a call itself may write; the progress engine writes the rest.
constexpr std::size_t kAtOnce = 256 << 10;

using State = SecureStream::State;

FrameSeal seal_of(const Digest& key, FrameCodes codes) {
  return codes == FrameCodes::macs ? FrameSeal(key) : FrameSeal(codes == FrameCodes::checksums);
}

std::vector<FrameSeal> seals_to_send(const std::vector<MeshConnection>& connections, FrameCodes codes) {
  std::vector<FrameSeal> seals;
  for (const MeshConnection& one : connections) seals.push_back(seal_of(one.keys.sending, codes));
  return seals;
}

}  // namespace

void PeerConnection::connect(asio::io_context& context, std::vector<MeshConnection> connections) {
  send_queue_.connect(seals_to_send(connections, codes_));
  for (std::size_t i = 0; i < connections.size(); ++i) {
    sockaddr_storage name = {};
    socklen_t length = sizeof(name);
    UniqueFd& fd = connections[i].fd;
    if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&name), &length) != 0)
      throw system_error("tcp: getsockname");
    Socket socket(context, name.ss_family == AF_INET ? asio::ip::tcp::v4() : asio::ip::tcp::v6(), fd.get());
    fd.release();
    socket.non_blocking(true);
    socket.set_option(asio::ip::tcp::no_delay(true));
    FrameDecoder reader(receive_queue_, seal_of(connections[i].keys.receiving, codes_));
    TcpStream& stream = *streams_.emplace_back(
        std::make_unique<TcpStream>(*this, std::move(reader), i, std::move(socket), std::move(connections[i].stream)));
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.ptr = &stream;
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, stream.socket.native_handle(), &event) != 0)
      throw system_error("tcp: epoll_ctl");
    ++open_;
  }
}

void PeerConnection::send(Message& message) {
  if (gone_) return;
  message.state = kSending;
  send_queue_.send(message);
  write(kAtOnce);
}

void PeerConnection::receive(Message& message) {
  message.state = kReceiving;
  receive_queue_.receive(message);  // even if the peer is gone: the message may have arrived
  write(kAtOnce);
}

bool PeerConnection::read(TcpStream& stream, std::size_t budget) {
  bool moved = false;
  for (std::size_t done = 0; (done < budget || stream.bytes.has_pending()) && stream.socket.is_open();) {
    const FrameDecoder::Buffers buffers = stream.reader.buffers();
    const auto [bytes, state] = stream.bytes.read(buffers);
    if (SecureStream::must_wait(state)) break;
    if (state == State::damaged) {
      damaged_ = true;
      drop("the encrypted data");
      return true;
    }
    if (state != State::done) {
      ended(stream, state == State::ended ? "it closed the connection" : stream.bytes.why());
      return true;
    }
    moved = true;
    done += bytes;
    if (const std::string_view wrong = stream.reader.decode(bytes); !wrong.empty()) {
      damaged_ = stream.reader.damaged();
      drop((damaged_ ? "" : "it sent ") + std::string(wrong));
      return true;
    }
    const bool all_read = bytes < buffers[0].size() + buffers[1].size();
    if (all_read && !stream.bytes.has_pending()) break;
  }
  return moved;
}

bool PeerConnection::write(std::size_t budget) {
  bool moved = false;
  for (const auto& stream : streams_)
    if (!gone_ && !stream->shut && send_queue_.has_work(stream->number)) moved |= write_stream(*stream, budget);
  return moved;
}

bool PeerConnection::write_stream(TcpStream& stream, std::size_t budget) {
  bool moved = false;
  SendQueue::Buffers buffers;
  for (std::size_t done = 0; done < budget && send_queue_.next(stream.number, buffers);) {
    const auto [bytes, state] = stream.bytes.write(buffers);
    stream.full = SecureStream::must_wait(state);
    if (stream.full) {
      watch_room(stream, true);
      return moved;
    }
    if (state != State::done) {
      write_failed(stream);
      return true;
    }
    moved = true;
    done += bytes;
    send_queue_.wrote(stream.number, bytes);
  }
  if (stream.watched && !send_queue_.has_work(stream.number)) watch_room(stream, false);
  if (send_queue_.close_sent(stream.number)) {
    stream.shut = true;
    Failure ignored;
    stream.socket.shutdown(Socket::shutdown_send, ignored);
  }
  return moved;
}

/// The peer has closed, in order if it sent `bye`. Data that it sent before may still be unread.
void PeerConnection::write_failed(TcpStream& stream) {
  stream.shut = true;
  while (stream.socket.is_open() && read(stream, 1 << 20)) {
  }
  if (stream.socket.is_open()) ended(stream, stream.bytes.why());
}

void PeerConnection::ended(TcpStream& stream, const std::string& why) {
  if (!stream.reader.close_received()) return drop(why);
  Failure ignored;
  stream.socket.close(ignored);
  stream.shut = true;
  gone_ = --open_ == 0;
}

bool PeerConnection::has_all() const noexcept {
  for (const auto& stream : streams_) {
    if (!stream->socket.is_open()) continue;
    int under_way = 0;
    if (!stream->shut || ::ioctl(const_cast<Socket&>(stream->socket).native_handle(), SIOCOUTQ, &under_way) != 0 ||
        under_way != 0)
      return false;
  }
  return true;
}

void PeerConnection::drop(const std::string& why) noexcept {
  Failure ignored;
  for (const auto& stream : streams_) {
    stream->socket.close(ignored);
    stream->shut = true;
  }
  gone_ = true;
  loss_ = why;
}

void PeerConnection::watch_room(TcpStream& stream, bool on) noexcept {
  if (stream.watched == on) return;
  stream.watched = on;
  epoll_event event = {};
  event.events = on ? EPOLLIN | EPOLLOUT : EPOLLIN;
  event.data.ptr = &stream;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, stream.socket.native_handle(), &event);
}

void PeerConnection::discard_communicator(std::uint32_t communicator) {
  receive_queue_.discard_communicator(communicator);
  send_queue_.discard_communicator(communicator);
  write(kAtOnce);  // credit for the peer
}

void PeerConnection::cancel(Message& message) noexcept {
  if (gone_ || message.state == kIdle) return;  // the message is not used any more
  if (message.state == kReceiving)
    receive_queue_.cancel(message);
  else if (!send_queue_.cancel(message))
    drop("no memory to complete a canceled message");
  message.state = kIdle;
}

}  // namespace tessera::comm::tcp
