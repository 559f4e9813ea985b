// What goes over a connection: frames, each a header of 64 bytes and its payload.
//
//   eager     a small message, whole, unasked
//   piece     a part of a message that its receiver has asked for; the parts come over several connections
//   ready     the receiver of `tag` is there: send it
//   announce  the sender of `tag` is there: ask for it
//   credit    nothing but the header's `consumed`
//   bye       the last frame of a connection that ends in order
//
// Which messages go unasked. Those of at most kEagerLimit bytes, while the ones that the receiver has not yet handed to
// their receives cost at most kCredit together; so a receiver's memory is bounded, and it can read on, always: nothing
// that is expected ever waits behind something unexpected. All others wait for `ready`, which a receiver of more than
// kEagerLimit sends by itself as soon as it is there; to others the sender announces itself.
//
// ready, announce, credit, bye and eager frames use the first of the connections between two ranks, in order.
//
// Each header has a checksum of its own, so that a damaged length is never waited for; the payload's is there where the
// two ends have agreed on it. TCP's own sum has 16 bits and is made by each device on the way anew: it misses what such
// a device, a tunnel or a proxy damages.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/comm/base_names.h"
#include "tessera/comm/transport.h"

namespace tessera::comm::tcp {

inline constexpr std::size_t kEagerLimit = 64 << 10;
inline constexpr std::size_t kCredit = 1 << 20;
inline constexpr std::size_t kEagerCost = 128;    // of a message, beside its bytes
inline constexpr std::size_t kPiece = 512 << 10;  // the most that one frame carries

enum class FrameKind : std::uint16_t { eager = 1, piece, ready, announce, credit, bye };

struct Frame {
  static constexpr std::uint32_t kMagic = 0x32435354;  // "TSC2": format and version

  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::credit;
  std::uint16_t announced = 0;  ///< 1: an `announce` of this message was sent too; it may come later
  MessageTag tag = {};
  std::uint32_t length = 0;       ///< bytes of payload that follow
  std::uint64_t total = 0;        ///< bytes of the whole message
  std::uint64_t offset = 0;       ///< of the payload in it
  std::uint64_t consumed = 0;     ///< cost of all eager messages that the sender of this frame has handed over so far
  std::uint64_t payload_sum = 0;  ///< base::checksum() of the payload; 0 where the ends don't check it
  std::uint64_t header_sum = 0;   ///< ... of what stands before it
};
static_assert(sizeof(Frame) == 64 && std::endian::native == std::endian::little, "the format is the memory's");

constexpr std::uint64_t eager_cost(std::uint64_t bytes) { return bytes + kEagerCost; }

/// The header_sum that belongs to the other fields.
std::uint64_t header_sum_of(const Frame& frame) noexcept;

/// What is wrong with a header whose sum is right, by itself, or "".
std::string_view flaw(const Frame& frame) noexcept;

}  // namespace tessera::comm::tcp
