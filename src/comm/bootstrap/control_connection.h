// One control connection of a running world, on the control thread. Frames are received one at a time; frames to send
// are queued up to a fixed size, so a sender never waits for a slow reader.
#pragma once

#include <array>
#include <boost/asio/generic/stream_protocol.hpp>
#include <boost/asio/io_context.hpp>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "tessera/comm/bootstrap/protocol.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

class ControlConnection {
 public:
  struct Message {
    protocol::Type type{};
    std::string payload;
  };
  using Frame = std::shared_ptr<const Message>;
  struct Events {
    /// Returns false to close the connection because the frame is invalid.
    std::function<bool(protocol::Type type, std::string_view payload)> frame;
    /// Called once, when the peer has closed or sent an invalid frame.
    std::function<void()> broken;
    /// Called once, when received data is corrupt. Nothing more is read; sending still works.
    std::function<void()> damaged;
  };
  static constexpr std::size_t kMaxQueued = std::size_t{16} << 20;  ///< bytes

  /// One thread runs `context` and calls the events; it must stop before this object is destroyed.
  ControlConnection(boost::asio::io_context& context, Connection connection, Events events);

  /// Starts reading. On the context's thread.
  void start();
  /// Any thread; never blocks. If the queue is full, messages on channels are dropped: a slow reader may still be
  /// alive, and a rank that needs a reply has a deadline.
  void send(Frame frame);
  /// Sends what is queued, then closes the sending side. On the context's thread, like all functions below.
  void finish();
  void close();
  bool open() const noexcept { return socket_.is_open(); }

 private:
  void read();
  void write_next();
  void write_rest();
  void when_ready(SecureStream::State state, void (ControlConnection::*then)());
  void shut_down();
  void break_off();

  boost::asio::io_context& context_;
  boost::asio::generic::stream_protocol::socket socket_;
  const Events events_;
  SecureStream stream_;
  Seal seal_;
  SealedReader reader_{seal_, protocol::kMaxControl};
  std::array<char, 16384> in_{};
  std::string out_;         // being written ...
  std::size_t out_at_ = 0;  // ... from here
  Frame out_frame_;
  bool reported_ = false;

  std::mutex mutex_;  // guards the members below
  std::deque<Frame> queue_;
  std::size_t queued_ = 0;
  bool writing_ = false;
  bool finishing_ = false;
  bool deaf_ = false;  // drops all further frames
};

}  // namespace tessera::comm
