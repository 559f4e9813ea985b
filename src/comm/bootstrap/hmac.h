// Random tokens, proof of knowing one without sending it, and authentication of frames by it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap/protocol.h"

namespace tessera::comm {

using protocol::Digest;

/// Uses the system's generator. Throws SystemError.
TESSERA_API Digest random_digest();
/// HMAC-SHA256 of `message` under `key`. Also works while the process exits.
TESSERA_API Digest prove(const Digest& key, std::string_view message);
/// PBKDF2 of `key`: takes about 20 ms, and so does each guess of one who knows the result.
TESSERA_API Digest stretch(const Digest& key);
/// Compares in time that doesn't depend on the content.
bool same(const Digest& a, const Digest& b);

TESSERA_API std::string to_hex(const Digest& digest);
/// Throws SystemError if the text is not 64 hexadecimal digits.
Digest from_hex(std::string_view text);

// Authentication of frames after the handshake: an HMAC binds each frame to its connection, its direction and its
// number, so that a damaged, forged, missing or repeated frame is detected.

/// One end of a connection. A sealed frame is its head (protocol::kHeadBytes), a checksum of the head, so that a
/// damaged length is not waited for, the payload, and the HMAC.
class Seal {
 public:
  static constexpr std::size_t kHeadBytes = protocol::kHeadBytes + 4;
  static constexpr std::size_t kProofBytes = 16;

  /// An inactive seal: frames are plain.
  Seal() = default;
  /// Only the two ends know `key`; one of them is the `first`.
  Seal(const Digest& key, bool first) : key_(key), active_(true), first_(first) {}
  explicit operator bool() const noexcept { return active_; }

  /// Seals the next frame to send and returns its bytes.
  std::string close(protocol::Type type, std::string_view payload);
  /// The head's content; empty if it is damaged, or declares more than `longest`.
  static std::optional<protocol::Head> open_head(std::string_view head, std::size_t longest);
  /// Checks the next complete frame received: true if it is what the other end sent.
  bool open(std::string_view head, std::string_view payload, std::string_view proof);

 private:
  Digest prove_frame(bool by_first, std::uint64_t number, std::string_view head, std::string_view payload) const;

  Digest key_{};
  bool active_ = false;
  bool first_ = false;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

/// Splits a stream of bytes into sealed frames, as protocol::FrameParser does with plain ones.
class SealedReader {
 public:
  enum class Fed : std::uint8_t { fine, refused, damaged };  ///< refused: `on_frame` returned false
  SealedReader(Seal& seal, std::size_t longest) : seal_(seal), longest_(longest) {}
  Fed feed(std::string_view bytes, const protocol::FrameParser::FrameHandler& on_frame);

 private:
  Seal& seal_;
  const std::size_t longest_;
  std::string rest_;
};

}  // namespace tessera::comm
