// Cuts what comes over one connection into frames, and lays payloads where they belong.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "backends/tcp/frame.h"

namespace tessera::tcp {

struct Inbound;  // a message on its way to us: the sink's

class FrameSink {
 public:
  /// A header that flaw() finds nothing wrong with. Sets `target` where a payload belongs to one. Returns what is wrong
  /// with it, or "".
  virtual std::string_view frame_begins(const Frame& frame, Inbound*& target) = 0;
  /// Where the next of the payload's bytes go: up to `bytes` of them from `offset` in the message, at least one.
  virtual std::span<std::byte> room_for(Inbound& target, std::size_t offset, std::size_t bytes) = 0;
  /// The frame's payload is complete. Only for frames with a target.
  virtual void frame_ends(Inbound& target, std::size_t bytes) = 0;

 protected:
  ~FrameSink() = default;
};

/// Knows no socket: the caller reads into buffers() and says how much has come. A small buffer of its own takes headers
/// and small payloads together, so that a small message costs one system call and one short copy; what doesn't fit goes
/// straight to where it belongs.
class FrameReader {
 public:
  using Buffers = std::array<std::span<std::byte>, 2>;

  explicit FrameReader(FrameSink& sink) : sink_(sink) {}

  /// To be filled in this order; the first may be empty, never both.
  Buffers buffers();
  /// `bytes` have come into what buffers() gave. Returns what is wrong with them, or "".
  std::string_view take(std::size_t bytes);
  /// `bye` has come: nothing more will, and the end of the connection is in order.
  bool said_bye() const noexcept { return bye_; }

 private:
  std::string_view take_staged();
  void advance(std::size_t bytes);

  FrameSink& sink_;
  Frame frame_;
  Inbound* target_ = nullptr;  // of the frame that is being read; null between two
  std::size_t done_ = 0;       // of its payload
  std::size_t direct_ = 0;     // what the last buffers() gave of the target's memory
  std::array<std::byte, 16 << 10> staging_;
  std::size_t begin_ = 0, end_ = 0;  // staged bytes that nobody has looked at
  bool bye_ = false;
};

}  // namespace tessera::tcp
