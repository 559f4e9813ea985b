// Cuts what comes over one connection into frames, and lays payloads where they belong.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "backends/tcp/frame.h"
#include "tessera/base/checksum.h"

namespace tessera::comm::tcp {

struct InboundMessage;  // a message on its way to us: the sink's

class FrameSink {
 public:
  /// A header that flaw() finds nothing wrong with. Sets `target` where a payload belongs to one. Returns what is wrong
  /// with it, or "".
  virtual std::string_view frame_begins(const Frame& frame, InboundMessage*& target) = 0;
  /// Where the next of the payload's bytes go: up to `bytes` of them from `offset` in the message, at least one.
  virtual std::span<std::byte> room_for(InboundMessage& target, std::size_t offset, std::size_t bytes) = 0;
  /// The frame's payload is complete. Only for frames with a target.
  virtual void frame_ends(InboundMessage& target, std::size_t bytes) = 0;

 protected:
  ~FrameSink() = default;
};

/// Knows no socket: the caller reads into buffers() and says how much has come. A small buffer of its own takes headers
/// and small payloads together, so that a small message costs one system call and one short copy; what doesn't fit goes
/// straight to where it belongs.
class FrameDecoder {
 public:
  using Buffers = std::array<std::span<std::byte>, 2>;

  /// `checked`: payloads have a checksum, which is compared.
  FrameDecoder(FrameSink& sink, bool checked) : sink_(sink), checked_(checked) {}

  /// To be filled in this order; the first may be empty, never both.
  Buffers buffers();
  /// `bytes` have come into what buffers() gave. Returns what is wrong with them, or "".
  std::string_view take(std::size_t bytes);
  /// `bye` has come: nothing more will, and the end of the connection is in order.
  bool said_bye() const noexcept { return bye_; }
  /// What take() found wrong is that the bytes are not those that were sent: no message that they belong to is
  /// complete.
  bool damaged() const noexcept { return damaged_; }

 private:
  std::string_view take_staged();
  std::string_view take_header();
  std::string_view begin_payload();
  std::string_view advance(std::span<const std::byte> bytes);
  std::string_view end_payload();
  std::string_view damage(std::string_view what) noexcept;

  FrameSink& sink_;
  const bool checked_;
  Frame frame_;
  InboundMessage* target_ = nullptr;  // of the frame that is being read; null between two
  std::size_t done_ = 0;              // of its payload
  std::span<std::byte> direct_;       // what the last buffers() gave of the target's memory
  RunningChecksum sum_;               // of the payload so far ...
  bool summed_ = false;               // ... unless it was compared as a whole
  std::array<std::byte, 16 << 10> staging_;
  std::size_t begin_ = 0, end_ = 0;  // staged bytes that nobody has looked at
  bool bye_ = false;
  bool damaged_ = false;
};

}  // namespace tessera::comm::tcp
