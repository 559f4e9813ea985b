// The messages to one peer: those that wait for a request, and frames that wait for room in a connection.
#pragma once

#include <array>
#include <boost/circular_buffer.hpp>
#include <boost/intrusive/list.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "backends/tcp/frame.h"
#include "backends/tcp/object_pool.h"

namespace tessera::comm::tcp {

struct OutboundMessage : Tagged, boost::intrusive::list_base_hook<> {
  enum class State : std::uint8_t {
    expected,  // requested, not sent yet
    waiting,   // sent, not requested yet
    queued,    // `handed` bytes of it are, or have been, in a connection's slot
    handed,    // all of its bytes
  };
  Message* message = nullptr;  // null: expected, or cancelled
  State state = State::expected;
  bool eager = false;
  bool rts_sent = false;
  const std::byte* data = nullptr;  // of byte `first` of the message
  std::size_t first = 0;
  std::size_t bytes = 0;
  std::size_t handed = 0;
  std::size_t written = 0;
  std::unique_ptr<std::byte[]> own;  // the unsent rest of a cancelled message
};

class SendQueue {
 public:
  using Buffers = std::array<std::span<const std::byte>, 2>;

  /// Before the first next(). `seals`: of each connection, in the direction to the peer.
  void connect(std::vector<FrameSeal> seals) {
    seals_ = std::move(seals);
    slots_.resize(seals_.size());
  }

  void send(Message& message);
  /// False: the message is partly sent, and there is no memory to complete it.
  [[nodiscard]] bool cancel(Message& message) noexcept;
  /// Ignores the requests of the peer for messages of this communicator: there are none.
  void discard_communicator(std::uint32_t communicator);
  /// Sends RTS of messages that the peer has not requested so far.
  void send_pending_rts();
  /// Queues a frame without payload.
  void queue_control(FrameKind kind, const MessageTag& tag);
  /// Queues the last frame of every connection, to be sent after all that is queued.
  void queue_close() noexcept { closing_ = true; }
  bool close_sent(std::size_t connection) const noexcept {
    return slots_[connection].close_sent && !slots_[connection].active;
  }

  /// The peer requests a message. False: it has done so before.
  bool on_cts(const MessageTag& tag);
  /// The peer's consumed cost of eager messages from this rank. False: more than was sent.
  bool on_consumed(std::uint64_t cost) noexcept;
  /// Adds to the consumed cost of the peer's messages.
  void add_consumed(std::uint64_t cost);

  /// Returns the next header and payload for a connection, not both empty. False: nothing.
  bool next(std::size_t connection, Buffers& buffers);
  bool has_work(std::size_t connection) const noexcept;
  /// `bytes` of what next() returned are in the connection.
  void wrote(std::size_t connection, std::size_t bytes);

  std::size_t entries() const noexcept { return table_.size(); }

 private:
  /// The frame that is being written to a connection.
  struct Slot {
    Frame frame;
    OutboundMessage* source = nullptr;  // of the payload
    std::size_t done = 0;               // bytes written, of header and payload
    bool active = false;
    bool close_sent = false;
  };
  struct Control {
    FrameKind kind;
    MessageTag tag;
  };
  using Queue = boost::intrusive::list<OutboundMessage>;

  bool fill(std::size_t connection);
  void seal(std::size_t connection);
  void prepare_frame(Frame& frame, OutboundMessage& source);
  void start(OutboundMessage& outbound);
  void send_rts(OutboundMessage& outbound);
  std::uint64_t in_flight() const noexcept { return eager_sent_ - eager_consumed_; }

  std::vector<FrameSeal> seals_;
  std::vector<Slot> slots_;
  boost::circular_buffer<Control> control_{64};
  ObjectPool<OutboundMessage> pool_;
  TagTable<OutboundMessage> table_;  // expected and waiting messages
  DiscardedCommunicators discarded_;
  Queue rts_pending_;  // waiting
  Queue eager_;
  Queue bulk_;
  std::uint64_t eager_sent_ = 0;      // cost of all eager messages of this rank ...
  std::uint64_t eager_consumed_ = 0;  // ... that the peer has delivered
  std::uint64_t consumed_ = 0;        // cost of the peer's messages that this rank has consumed
  std::uint64_t reported_ = 0;        // ... as reported to the peer
  bool credit_queued_ = false;
  bool closing_ = false;
};

}  // namespace tessera::comm::tcp
