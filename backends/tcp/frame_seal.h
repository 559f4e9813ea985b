// The codes of the frames of one direction of a connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "backends/tcp/frame.h"
#include "tessera/base/checksum.h"
#include "tessera/comm/bootstrap/hmac.h"

struct evp_cipher_ctx_st;

namespace tessera::comm::tcp {

/// Computes the same codes at both ends. Without a key they are checksums (XXH3, 64 bits), which detect damage. With a
/// key they are MACs (GMAC with AES-256: NIST SP 800-38D), which detect every change by someone without the key. Their
/// nonce is the number of the frame, so that a frame that is repeated, missing, of another place or of another
/// direction has a wrong code, too.
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
  void begin_payload();
  void add(std::span<const std::byte> part);
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
