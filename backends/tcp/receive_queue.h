// The messages from one peer: matches posted receives with arriving messages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>

#include "backends/tcp/frame.h"
#include "backends/tcp/object_pool.h"

namespace tessera::comm::tcp {

class SendQueue;

/// A message in transit to this rank.
struct InboundMessage : Tagged {
  Message* message = nullptr;    // the receive; null: not posted yet, or cancelled
  std::byte* storage = nullptr;  // where an eager message waits for its receive
  std::size_t total = 0;         // of the message, once `known`
  std::size_t begun = 0;         // bytes in frames whose headers have arrived
  std::size_t arrived = 0;       // bytes in frames that are complete
  bool known = false;            // a frame of it has arrived
  bool eager = false;
  bool complete = false;
  bool cts_sent = false;      // `cts` was sent
  bool rts_received = false;  // `rts` has arrived ...
  bool rts_due = false;       // ... or will
  bool cancelled = false;     // no receive wants it: its data is discarded
};

class ReceiveQueue {
 public:
  explicit ReceiveQueue(SendQueue& send_queue) : send_queue_(send_queue) {}

  void receive(Message& message);
  /// Whether a message of this tag, or its RTS, has come and has no receive.
  bool arrived(const MessageTag& tag) noexcept;
  void cancel(Message& message) noexcept;
  /// Treats all present and future messages of this communicator as if their receives had been cancelled.
  void discard_communicator(std::uint32_t communicator);

  /// Called with a header that flaw() accepts. Sets `target` if a payload belongs to a message. Returns an error in the
  /// header, or "".
  std::string_view frame_begins(const Frame& frame, InboundMessage*& target);
  /// Returns memory for the next bytes of the payload: up to `bytes` from `offset` in the message, at least one.
  std::span<std::byte> room_for(InboundMessage& target, std::size_t offset, std::size_t bytes);
  /// The frame's payload is complete. Called only for frames with a target.
  void frame_ends(InboundMessage& target, std::size_t bytes);

  // For tests.
  std::size_t entries() const noexcept { return table_.size(); }  ///< expected, waiting, or to be discarded
  std::uint64_t held() const noexcept { return held_; }           ///< cost of eager messages that are not delivered yet
  std::uint64_t rts_count() const noexcept { return rts_count_; }

 private:
  InboundMessage& entry(const MessageTag& tag);
  std::string_view begin_eager(const Frame& frame, InboundMessage*& target);
  std::string_view begin_data(const Frame& frame, InboundMessage*& target);
  std::string_view on_rts(const Frame& frame);
  void send_cts(InboundMessage& inbound);
  void finish(InboundMessage& inbound);
  void release_storage(InboundMessage& inbound) noexcept;
  void forget(InboundMessage& inbound) noexcept;

  SendQueue& send_queue_;
  ObjectPool<InboundMessage> pool_;
  BufferPool buffers_;
  TagTable<InboundMessage> table_;
  DiscardedCommunicators discarded_;
  std::uint64_t held_ = 0;       // cost of the eager messages that are not delivered yet
  std::uint64_t rts_count_ = 0;  // that have arrived
  std::array<std::byte, 64 << 10> trash_;
};

/// Decodes the byte stream of one connection into frames and places their payloads. Independent of sockets: the caller
/// reads into buffers() and reports the number of bytes. A small internal buffer receives headers and small payloads
/// together, so that a small message costs one system call and one short copy; larger payloads go directly to their
/// destination.
class FrameDecoder {
 public:
  using Buffers = std::array<std::span<std::byte>, 2>;

  /// `seal`: of the direction from the peer.
  FrameDecoder(ReceiveQueue& sink, FrameSeal seal) : sink_(sink), seal_(std::move(seal)) {}

  /// To be filled in this order; the first may be empty, but not both.
  Buffers buffers();
  /// Processes `bytes` that were read into buffers(). Returns an error in them, or "".
  std::string_view decode(std::size_t bytes);
  /// `bye` has arrived: no more data follows, and the end of the connection is in order.
  bool close_received() const noexcept { return closed_; }
  /// decode() found bytes that differ from those sent. No message that they belong to is complete.
  bool damaged() const noexcept { return damaged_; }

 private:
  std::string_view read_staged();
  std::string_view read_header();
  std::string_view begin_payload();
  std::string_view advance(std::span<const std::byte> bytes);
  std::string_view end_payload();
  std::string_view damage(std::string_view what) noexcept;

  ReceiveQueue& sink_;
  FrameSeal seal_;
  Frame frame_;
  InboundMessage* target_ = nullptr;  // of the frame being read; null between two frames
  std::size_t done_ = 0;              // of its payload
  std::span<std::byte> direct_;       // the part of the target's memory that the last buffers() returned
  bool verified_ = false;             // the payload, as a whole
  std::array<std::byte, 16 << 10> staging_;
  std::size_t begin_ = 0, end_ = 0;  // staged bytes that are not processed yet
  bool closed_ = false;
  bool damaged_ = false;
};

}  // namespace tessera::comm::tcp
