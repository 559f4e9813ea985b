// Decodes the byte stream of one connection into frames and places their payloads.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>
#include <utility>

#include "backends/tcp/frame_seal.h"
#include "backends/tcp/receive_queue.h"

namespace tessera::comm::tcp {

/// Independent of sockets: the caller reads into buffers() and reports the number of bytes. A small internal buffer
/// receives headers and small payloads together, so that a small message costs one system call and one short copy;
/// larger payloads go directly to their destination.
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
