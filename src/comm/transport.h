// Moves bytes between the ranks of a world: all that a point-to-point backend implements. The collectives over it,
// their order, deadlines and errors are common (host/host_runtime.h).
#pragma once

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm {

/// What joins a send with its receive, beside the two ranks. Each value is used once per pair and direction.
struct MessageTag {
  std::uint32_t communicator = 0;  ///< at most kMostCommunicators live at once
  std::uint32_t operation = 0;     ///< counts up; wraps
  std::uint32_t step = 0;          ///< within the operation, below 2^24
  auto operator<=>(const MessageTag&) const = default;
};
inline constexpr std::uint32_t kMostCommunicators = 4096;

struct Message;
class NativeCollectives;

/// Who started a message, and is told when it is through.
class TESSERA_API MessageOwner {
 public:
  /// The buffer is the caller's again. `bytes` is what the sender sent; where it differs from message.bytes, the two
  /// ranks called different operations, and the buffer's content is undefined. Under the engine's lock; possibly from
  /// inside Transport::send() or receive(), so it only notes what is next.
  virtual void message_done(Message& message, std::size_t bytes) noexcept = 0;

 protected:
  ~MessageOwner() = default;
};

/// One message on its way. Belongs to its owner, and stays where it is until message_done() or cancel().
struct Message {
  std::byte* data = nullptr;  ///< only read by send
  std::size_t bytes = 0;      ///< 0 is a message too
  int peer = 0;               ///< rank in the transport's world
  MessageTag tag;
  MessageOwner* owner = nullptr;
  std::atomic<std::uint64_t>* sent =
      nullptr;              ///< the transport adds the payload bytes that it really sent; may be null
  std::uint32_t index = 0;  ///< the owner's

  // The transport's, while the message is on its way.
  Message* next = nullptr;
  Message* previous = nullptr;
  std::size_t moved = 0;
  void* handle = nullptr;
  std::uint32_t state = 0;
};

/// What a transport tells its world. Under the engine's lock, from within poll(), send() or receive().
class TESSERA_API TransportEvents {
 public:
  /// Nothing more can come from or go to `peer`. Its pending messages are cancelled by the world.
  virtual void connection_lost(int peer, const std::string& why) noexcept = 0;
  /// What came from `peer` is not what it sent: no message that it belongs to is complete, and nothing more will come.
  /// `what`: "the content of a message". Not for what a dying peer leaves half done.
  virtual void message_damaged(int peer, const std::string& what) noexcept = 0;
  /// Nothing works any more.
  virtual void transport_failed(const std::string& why) noexcept = 0;

 protected:
  ~TransportEvents() = default;
};

/// Messages between two ranks may overtake each other: the tag joins them. A send may start before its receive and the
/// other way round; neither side's memory grows with large messages that nobody has asked for. poll() moves everything
/// a bounded step and never blocks; all functions but the constructor run under the engine's lock.
class TESSERA_API Transport : public Pollable {
 public:
  virtual void send(Message& message) noexcept = 0;
  virtual void receive(Message& message) noexcept = 0;
  /// Gives the message up, in any state: on return neither its memory nor the Message itself is touched any more, and
  /// message_done() is not called. What was half sent is completed from memory of the transport's own; where that can't
  /// be promised, the transport never touched the caller's memory to begin with.
  virtual void cancel(Message& message) noexcept = 0;
  /// No message of this communicator is sent or received here any more, and its number is not used again: what has come
  /// for it without a receive, and what still comes, is thrown away.
  virtual void discard_communicator(std::uint32_t communicator) noexcept = 0;
  /// True while peers need this rank to poll although no message of its own is on its way: it has given some up. Ends
  /// by itself within seconds.
  virtual bool needs_polls() const noexcept { return false; }
  /// How threads of this rank sleep while messages are on their way.
  virtual ProgressWaiter& waiter() noexcept = 0;
  /// Whole collectives by the library below; null where it has none.
  virtual NativeCollectives* native() noexcept { return nullptr; }
  /// Waits, bounded, until what was sent has left, and ends the connections. The world's ranks have all said that they
  /// close, unless `failed`.
  virtual void close(bool failed) noexcept = 0;
};

}  // namespace tessera::comm
