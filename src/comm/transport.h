// A transport moves bytes between the ranks of a world: all that a point-to-point backend implements. The collectives
// with their order, deadlines and errors are common (host/host_runtime.h).
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm {

/// Pairs a send with its receive, together with the two ranks. Each value is used once per pair and direction.
struct MessageTag {
  std::uint32_t communicator = 0;                       ///< at most kMaxCommunicators live at once
  std::uint32_t operation = 0;                          ///< counts up; wraps
  std::uint32_t step = 0;                               ///< within the operation, below 2^24
  auto operator<=>(const MessageTag&) const = default;  ///< orders by communicator, operation, step
};
/// Limit of MessageTag::communicator values in use at one time.
inline constexpr std::uint32_t kMaxCommunicators = 4096;

struct Message;
class NativeCollectives;

/// The component that starts a message and is notified of its completion.
class TESSERA_API MessageOwner {
 public:
  /// The buffer belongs to the caller again. `bytes` is the sender's size; if it differs from message.bytes, the two
  /// ranks called different operations, and the buffer's content is undefined. Called under the engine's lock, possibly
  /// from inside Transport::send() or receive(), so it only records the next action.
  virtual void message_done(Message& message, std::size_t bytes) noexcept = 0;

 protected:
  ~MessageOwner() = default;
};

/// One message in flight. Its owner keeps it in place until message_done() or cancel().
struct Message {
  std::byte* data = nullptr;      ///< send only reads it
  std::size_t bytes = 0;          ///< 0 is a message too
  int peer = 0;                   ///< rank in the transport's world
  MessageTag tag;                 ///< tag of this message; both ranks use the same value
  MessageOwner* owner = nullptr;  ///< notified of the completion
  std::atomic<std::uint64_t>* sent =
      nullptr;              ///< the transport adds the payload bytes that it actually sends; may be null
  std::uint32_t index = 0;  ///< number that the owner sets and reads

  // State of the transport while the message is in flight.
  Message* next = nullptr;      ///< list link
  Message* previous = nullptr;  ///< list link
  std::size_t moved = 0;        ///< size or number, as the transport needs
  void* handle = nullptr;       ///< handle of the library below
  std::uint32_t state = 0;      ///< flags
};

/// A transport's callbacks to its world. Called under the engine's lock, from within poll(), send() or receive().
class TESSERA_API TransportEvents {
 public:
  /// Nothing more can be exchanged with `peer`. The world cancels its pending messages.
  virtual void connection_lost(int peer, const std::string& why) noexcept = 0;
  /// Data received from `peer` is corrupt: the affected message is incomplete, and nothing more will come from this
  /// peer. `what`: "the content of a message". Not for messages truncated by a dying peer. `authenticated`: an
  /// authentication code says so, else a checksum.
  virtual void message_damaged(int peer, const std::string& what, bool authenticated) noexcept = 0;
  /// The transport can no longer be used.
  virtual void transport_failed(const std::string& why) noexcept = 0;
  /// The process exits, and the library below is about to end. Unlike the others, called outside the engine's lock: a
  /// world without operations in flight leaves, as its destructor would make it.
  virtual void process_exits() noexcept {}

 protected:
  ~TransportEvents() = default;
};

/// Messages between two ranks may overtake each other; the tag pairs send and receive. Either side may start first.
/// Large messages without a matching receive don't increase either side's memory. poll() makes a bounded amount of
/// progress and never blocks. All functions but the constructor run under the engine's lock.
class TESSERA_API Transport : public Pollable {
 public:
  /// Starts to send message.data to message.peer. May call message_done() before it returns.
  virtual void send(Message& message) noexcept = 0;
  /// Starts to receive from message.peer into message.data. May call message_done() before it returns.
  virtual void receive(Message& message) noexcept = 0;
  /// Whether a message with this tag has come from `peer`, or its announcement, and has no receive yet.
  virtual bool arrived(int /*peer*/, const MessageTag& /*tag*/) noexcept { return false; }
  /// Whether arrived() is implemented: receives from any rank need it.
  virtual bool knows_arrivals() const noexcept { return false; }
  /// Cancels the message in any state. After return, neither its memory nor the Message is accessed, and message_done()
  /// is not called. A partly sent message is completed from the transport's own memory; a transport that can't
  /// guarantee this never accesses the caller's memory at all.
  virtual void cancel(Message& message) noexcept = 0;
  /// No more messages of this communicator are sent or received on this rank, and its number is not reused. Messages
  /// without a receive, and those still to arrive, are dropped.
  virtual void discard_communicator(std::uint32_t communicator) noexcept = 0;
  /// True while peers need this rank to poll although it has no message in flight, because it has cancelled some.
  /// Becomes false within seconds.
  virtual bool needs_polls() const noexcept { return false; }
  /// Lets the threads of this rank sleep while messages are in flight.
  virtual ProgressWaiter& waiter() noexcept = 0;
  /// Native collectives of the library below; null if it has none.
  virtual NativeCollectives* native() noexcept { return nullptr; }
  /// Waits, for a bounded time, until everything sent has left, and closes the connections. All ranks of the world have
  /// sent their departure, unless `failed`.
  virtual void close(bool failed) noexcept = 0;
};

}  // namespace tessera::comm
