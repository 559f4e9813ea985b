// One connection of the running world, on the control thread: frames come in one at a time; frames that go out wait in
// a queue of bounded size, so that who sends never waits for who reads.
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
    /// False: it makes no sense, and the line breaks.
    std::function<bool(protocol::Type type, std::string_view payload)> frame;
    /// Once: the other side has gone, or sends what makes no sense.
    std::function<void()> broken;
    /// Once: what came is not what was sent. Nothing more is read; what is sent still goes.
    std::function<void()> damaged;
  };
  static constexpr std::size_t kMostQueued = std::size_t{16} << 20;  ///< bytes

  /// `context` is run by one thread, which calls the events; it is stopped before the line goes.
  ControlConnection(boost::asio::io_context& context, Connection connection, Events events);

  /// Begins to read. On the context's thread.
  void start();
  /// Any thread; never waits. Where the queue is full, what ranks tell each other is lost: how slowly somebody reads
  /// says nothing about whether it lives, and whoever needs an answer has a deadline.
  void send(Frame frame);
  /// What is queued still goes, then the other side reads the end. On the context's thread, as all below.
  void finish();
  void close();
  bool open() const noexcept { return socket_.is_open(); }

 private:
  void read();
  void write_next();
  void shut_down();
  void break_off();

  boost::asio::io_context& context_;
  boost::asio::generic::stream_protocol::socket socket_;
  const Events events_;
  Seal seal_;
  SealedReader reader_{seal_, protocol::kLongestControl};
  std::array<char, 16384> in_{};
  std::string out_;  // what is being written
  bool told_ = false;

  std::mutex mutex_;  // of what follows
  std::deque<Frame> queue_;
  std::size_t queued_ = 0;
  bool writing_ = false;
  bool finishing_ = false;
  bool deaf_ = false;  // takes nothing more
};

}  // namespace tessera::comm
