// What we send to one peer: messages that wait to be asked for, and frames that wait for room in a connection.
#pragma once

#include <array>
#include <atomic>
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
    expected,  // asked for, not sent yet
    waiting,   // sent, not asked for yet
    queued,    // `handed` bytes of it are, or have been, in a connection's slot
    handed,    // all of them
  };
  Message* message = nullptr;  // null: expected, or cancelled
  State state = State::expected;
  bool eager = false;
  bool announced = false;
  const std::byte* data = nullptr;  // of byte `first` of the message
  std::size_t first = 0;
  std::size_t bytes = 0;
  std::size_t handed = 0;
  std::size_t written = 0;
  std::unique_ptr<std::byte[]> own;  // what is left of it, once cancelled
};

class SendQueue {
 public:
  using Buffers = std::array<std::span<const std::byte>, 2>;

  /// `checked`: payloads get a checksum.
  SendQueue(std::size_t connections, bool checked) : checked_(checked), slots_(connections), control_(64) {}

  void send(Message& message);
  /// False: half sent, and no memory to complete it.
  [[nodiscard]] bool cancel(Message& message) noexcept;
  /// The peer may still ask for messages of this communicator: there are none.
  void discard_communicator(std::uint32_t communicator);
  /// Tells the peer of messages that it has not asked for so far.
  void announce_waiting();
  /// Queues a frame without payload.
  void tell(FrameKind kind, const MessageTag& tag);
  /// The last frame of every connection, once all that is queued has gone.
  void queue_close() noexcept { closing_ = true; }
  bool said_bye(std::size_t connection) const noexcept {
    return slots_[connection].said_bye && !slots_[connection].active;
  }

  /// The peer asks for a message. False: it has done so before.
  bool note_ready(const MessageTag& tag);
  /// What the peer has consumed of our eager messages. False: more than there were.
  bool note_consumed(std::uint64_t cost) noexcept;
  /// What we have consumed of the peer's.
  void add_consumed(std::uint64_t cost);

  /// What comes next on a connection: header and payload, not both empty. False: nothing.
  bool next(std::size_t connection, Buffers& buffers);
  bool has_work(std::size_t connection) const noexcept;
  /// `bytes` of what next() gave are in the connection.
  void wrote(std::size_t connection, std::size_t bytes);

  std::size_t entries() const noexcept { return table_.size(); }

 private:
  /// The frame that is being written to a connection.
  struct Slot {
    Frame frame;
    OutboundMessage* source = nullptr;  // of its payload
    std::size_t done = 0;               // bytes written, of header and payload
    bool active = false;
    bool said_bye = false;
  };
  struct Control {
    FrameKind kind;
    MessageTag tag;
  };
  using Queue = boost::intrusive::list<OutboundMessage>;

  bool fill(std::size_t connection);
  void seal(Slot& slot) const noexcept;
  void take_piece(Frame& frame, OutboundMessage& source);
  void start(OutboundMessage& outbound);
  void announce(OutboundMessage& outbound);
  std::uint64_t in_flight() const noexcept { return eager_sent_ - eager_consumed_; }

  const bool checked_;
  std::vector<Slot> slots_;
  boost::circular_buffer<Control> control_;
  ObjectPool<OutboundMessage> pool_;
  TagTable<OutboundMessage> table_;  // expected and waiting ones
  DiscardedCommunicators given_up_;
  Queue unannounced_;  // waiting
  Queue eager_;
  Queue bulk_;
  std::uint64_t eager_sent_ = 0;      // cost of all of ours ...
  std::uint64_t eager_consumed_ = 0;  // ... that the peer has handed over
  std::uint64_t consumed_ = 0;        // cost of the peer's that we have
  std::uint64_t told_ = 0;            // ... as the peer knows it
  bool credit_queued_ = false;
  bool closing_ = false;
};

}  // namespace tessera::comm::tcp
