// Frames between two ranks that have proved themselves to each other: each is bound by an HMAC to its connection, its
// direction and its number, so that one that was damaged, forged, left out or sent again is found.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/bootstrap/hmac.h"
#include "tessera/comm/bootstrap/protocol.h"

namespace tessera::comm {

/// One end of a connection. A sealed frame is its head (wire::kHeadBytes), a checksum of that, so that a damaged length
/// is not waited for, the payload, and the HMAC.
class Seal {
 public:
  static constexpr std::size_t kHeadBytes = protocol::kHeadBytes + 4;
  static constexpr std::size_t kProofBytes = 16;

  /// Of a connection without: frames are plain.
  Seal() = default;
  /// `key` is known to the two ends alone; one of them is the `first`.
  Seal(const Digest& key, bool first) : key_(key), active_(true), first_(first) {}
  explicit operator bool() const noexcept { return active_; }

  /// The next frame that is sent, as bytes.
  std::string close(protocol::Type type, std::string_view payload);
  /// The head's content; nothing where it is damaged, or announces more than `longest`.
  static std::optional<protocol::Head> open_head(std::string_view head, std::size_t longest);
  /// The next frame that has come, whole: true where it is what the other end sent.
  bool open(std::string_view head, std::string_view payload, std::string_view proof);

 private:
  Digest prove_frame(bool by_first, std::uint64_t number, std::string_view head, std::string_view payload) const;

  Digest key_{};
  bool active_ = false;
  bool first_ = false;
  std::uint64_t sent_ = 0;
  std::uint64_t received_ = 0;
};

/// Cuts a stream of bytes into sealed frames, as wire::FrameParser does with plain ones.
class SealedReader {
 public:
  enum class Fed : std::uint8_t { fine, refused, damaged };  ///< refused: by `take`
  SealedReader(Seal& seal, std::size_t longest) : seal_(seal), longest_(longest) {}
  Fed feed(std::string_view bytes, const protocol::FrameParser::Take& take);

 private:
  Seal& seal_;
  const std::size_t longest_;
  std::string rest_;
};

}  // namespace tessera::comm
