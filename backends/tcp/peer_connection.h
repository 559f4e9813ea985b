// The connections between this rank and one peer, with their receive and send queues.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "backends/tcp/mesh_connector.h"
#include "backends/tcp/receive_queue.h"
#include "backends/tcp/send_queue.h"
#include "backends/tcp/tcp_options.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::tcp {

class PeerConnection;

/// One connection of a peer; the epoll set refers to it.
struct TcpStream {
  TcpStream(PeerConnection& owner, FrameDecoder its_reader, std::size_t its_number, Socket open_socket,
            SecureStream its_bytes)
      : peer(owner),
        number(its_number),
        socket(std::move(open_socket)),
        bytes(std::move(its_bytes)),
        reader(std::move(its_reader)) {}
  PeerConnection& peer;
  const std::size_t number;
  Socket socket;
  SecureStream bytes;  // of the socket
  FrameDecoder reader;
  bool full = false;     // the last write found no room
  bool watched = false;  // also for room to write
  bool shut = false;     // nothing more is written
};

class PeerConnection {
 public:
  /// Without connections: messages are queued. `epoll`: the set that will watch the connections.
  PeerConnection(FrameCodes codes, int epoll) : epoll_(epoll), codes_(codes) {}
  PeerConnection(const PeerConnection&) = delete;
  PeerConnection& operator=(const PeerConnection&) = delete;

  /// Once. Owns the connections.
  void connect(boost::asio::io_context& context, std::vector<MeshConnection> connections);
  bool connected() const noexcept { return !streams_.empty(); }

  void send(Message& message);
  void receive(Message& message);
  bool arrived(const MessageTag& tag) noexcept { return receive_queue_.arrived(tag); }
  void cancel(Message& message) noexcept;
  void discard_communicator(std::uint32_t communicator);
  /// Only queues; write() must follow.
  void send_pending_rts() { send_queue_.send_pending_rts(); }

  /// Reads at most about `budget` bytes from one connection. True if data arrived.
  bool read(TcpStream& stream, std::size_t budget);
  /// Writes at most about `budget` bytes to each connection that may have room. True if data was written.
  bool write(std::size_t budget);

  std::vector<std::unique_ptr<TcpStream>>& streams() noexcept { return streams_; }
  /// True if no connection is left.
  bool gone() const noexcept { return gone_; }
  /// Why the connections ended, if not in order.
  const std::string& loss() const noexcept { return loss_; }
  /// True if the cause is damaged data, which loss() names.
  bool damaged() const noexcept { return damaged_; }
  /// Whether the data has MACs or is encrypted: damage is then a change on the way.
  bool authenticated() const noexcept {
    return codes_ == FrameCodes::macs || (!streams_.empty() && streams_.front()->bytes.encrypted());
  }

  /// Sends what is queued, then the last frame; read() and write() continue until gone().
  void queue_close() noexcept { send_queue_.queue_close(); }
  /// True if the peer's system has received all sent data including the last frame: none of it is lost any more,
  /// regardless of which side closes when.
  bool has_all() const noexcept;
  void drop(const std::string& why) noexcept;

  const ReceiveQueue& receive_queue() const noexcept { return receive_queue_; }
  const SendQueue& send_queue() const noexcept { return send_queue_; }

 private:
  bool write_stream(TcpStream& stream, std::size_t budget);
  void write_failed(TcpStream& stream);
  void ended(TcpStream& stream, const std::string& why);
  void watch_room(TcpStream& stream, bool on) noexcept;

  const int epoll_;
  const FrameCodes codes_;
  SendQueue send_queue_;
  ReceiveQueue receive_queue_{send_queue_};
  std::vector<std::unique_ptr<TcpStream>> streams_;
  std::size_t open_ = 0;
  bool gone_ = false;
  bool damaged_ = false;
  std::string loss_;
};

}  // namespace tessera::comm::tcp
