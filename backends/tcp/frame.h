// The wire format of a connection: frames, each a header of 80 bytes and its payload.
//
//   eager     a small message, complete, sent without a request
//   data      a part of a message that its receiver has requested; the parts use several connections
//   cts       the receive of `tag` is posted: send the message
//   rts       the send of `tag` is posted: request the message
//   credit    only carries the header's `consumed`
//   close     the last frame of a connection that closes in order
//
// Eager messages. A message is eager if it has at most kEagerLimit bytes and the eager messages that the receiver has
// not yet delivered to receives cost at most kCredit together. This bounds the receiver's memory, and the receiver can
// always continue to read: an expected message never waits behind an unexpected one. All other messages wait for
// `cts`. A receive of more than kEagerLimit sends it at once when posted; for others the sender sends `rts`.
//
// cts, rts, credit, close and eager frames use the first connection between two ranks, in order.
//
// The header and the payload have a code each (FrameSeal), so that a receiver never waits for a wrong length. TCP's
// own checksum has 16 bits and is recomputed by each device on the way: it misses damage by such a device, a tunnel or
// a proxy.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "tessera/base/checksum.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/transport.h"

struct evp_cipher_ctx_st;

namespace tessera::comm::tcp {

inline constexpr std::size_t kEagerLimit = 64 << 10;
inline constexpr std::size_t kCredit = 1 << 20;
inline constexpr std::size_t kEagerCost = 128;       // of a message, in addition to its bytes
inline constexpr std::size_t kMaxChunk = 512 << 10;  // maximum payload of a frame

enum class FrameKind : std::uint16_t { eager = 1, data, cts, rts, credit, close };

/// Of a header or a payload, by FrameSeal.
using FrameCode = std::array<std::byte, 16>;

struct Frame {
  static constexpr std::uint32_t kMagic = 0x33435354;  // "TSC3": format and version

  std::uint32_t magic = kMagic;
  FrameKind kind = FrameKind::credit;
  std::uint16_t rts_sent = 0;  ///< 1: an `rts` of this message was sent too; it may arrive later
  MessageTag tag = {};
  std::uint32_t length = 0;    ///< bytes of payload that follow
  std::uint64_t total = 0;     ///< bytes of the whole message
  std::uint64_t offset = 0;    ///< of the payload in the message
  std::uint64_t consumed = 0;  ///< cost of all eager messages that the sender of this frame has delivered so far
  FrameCode payload_code{};    ///< of the payload; zeros if there is none, or the ends don't check it
  FrameCode header_code{};     ///< of the fields before it
};
static_assert(sizeof(Frame) == 80 && std::endian::native == std::endian::little, "the format is the memory's");

constexpr std::uint64_t eager_cost(std::uint64_t bytes) { return bytes + kEagerCost; }

/// Describes an error in a header whose code is right, or returns "".
std::string_view flaw(const Frame& frame) noexcept;

/// The codes of the frames of one direction of a connection: the same at both ends. Without a key they are checksums
/// (XXH3, 64 bits), which detect damage. With a key they are MACs (GMAC with AES-256: NIST SP 800-38D), which detect
/// every change by someone without the key. Their nonce is the number of the frame, so that a frame that is repeated,
/// missing, of another place or of another direction has a wrong code, too.
class FrameSeal {
 public:
  /// Checksums of the headers, and of the payloads if `payloads`.
  explicit FrameSeal(bool payloads) : payloads_(payloads) {}
  /// MACs of headers and payloads under a key of this direction alone. Throws SystemError.
  explicit FrameSeal(const Digest& key);

  bool keyed() const noexcept { return context_ != nullptr; }
  /// Whether payloads have a code.
  bool payloads() const noexcept { return payloads_; }

  // All throw SystemError.
  /// Of the current frame's header with its other fields.
  FrameCode header_code(const Frame& frame);
  /// Of the current frame's payload.
  FrameCode payload_code(std::span<const std::byte> payload);
  /// Likewise, of a payload that arrives in parts, with no header in between.
  void begin_payload() { keyed() ? begin_mac(true) : sum_.reset(); }
  void add(std::span<const std::byte> part) { keyed() ? add_to_mac(part) : sum_.add(part); }
  FrameCode payload_code();
  /// The header and the payload of the current frame are complete; the next one follows.
  void next_frame() noexcept { ++number_; }

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const noexcept;
  };
  void begin_mac(bool payload);
  void add_to_mac(std::span<const std::byte> part);
  FrameCode end_mac();

  bool payloads_ = false;
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;  // with the key; null: checksums
  std::uint64_t number_ = 0;                          // of the current frame
  RunningChecksum sum_;                               // of the payload so far, without a key
};

/// In a time that doesn't depend on the bytes.
bool same(const FrameCode& a, const FrameCode& b) noexcept;

}  // namespace tessera::comm::tcp
