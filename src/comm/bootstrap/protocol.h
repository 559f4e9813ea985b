// The protocol of control connections, as bytes. Independent of sockets, so that it can be tested with arbitrary bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/base_names.h"

namespace tessera::comm::protocol {

/// Version of everything in this file: ranks of different versions refuse each other.
inline constexpr std::uint32_t kVersion = 7;

/// A frame is its type, the length of its payload (4 bytes, little-endian), and the payload. After the handshake frames
/// are also sealed (hmac.h).
enum class Type : char {
  challenge = 'c',  ///< rank 0's first message
  hello = 'h',      ///< the other rank's reply
  reply = 'a',      ///< rank 0 admits the rank, or gives the reason why not
  data = 'd',       ///< an exchange during setup
  refusal = 'r',    ///< a text: the sender fails the start
  opened = 'o',     ///< from a child: it and all behind it have opened a channel; from a parent: all ranks have
  message = 't',    ///< a message on a channel
  lost = 'l',       ///< a rank died
  left = 'g',       ///< a rank closed normally
  probe = 'p',      ///< to a parent, and its reply: it is alive, and has forwarded all that was sent before
};

inline constexpr std::size_t kHeadBytes = 5;
inline constexpr std::size_t kMaxHandshake = 1024;    ///< payload of a frame before the handshake is complete
inline constexpr std::size_t kMaxControl = 1 << 16;   ///< ... of a frame on a channel
inline constexpr std::size_t kMaxExchange = 1 << 20;  ///< of one rank's blob
inline constexpr std::size_t kMaxText = 400;          ///< names of runs and reasons; longer ones are truncated
inline constexpr std::size_t kMaxName = 16;           ///< of a channel

struct Head {
  Type type{};
  std::uint32_t length = 0;
};
std::string encode_head(Type type, std::size_t length);
/// Empty if `bytes` are not of this protocol, or declare more than `longest`.
std::optional<Head> decode_head(std::string_view bytes, std::size_t longest);
std::string encode_frame(Type type, std::string_view payload);

/// Splits a stream of bytes into frames. Holds at most one incomplete frame in addition to its input.
class FrameParser {
 public:
  using FrameHandler = std::function<bool(Type type, std::string_view payload)>;
  explicit FrameParser(std::size_t longest) : longest_(longest) {}
  /// Passes each complete frame to `on_frame` until that returns false. Returns false, on all later calls too, if the
  /// bytes are not of this protocol or `on_frame` returned false.
  bool feed(std::string_view bytes, const FrameHandler& on_frame);

 private:
  const std::size_t longest_;
  std::string rest_;
  bool broken_ = false;
};

using Digest = std::array<std::uint8_t, 32>;

struct Challenge {
  std::uint32_t version = kVersion;
  Digest nonce{};
  Digest session{};      ///< of rank 0: different at each start; zeros before a TLS session
  std::uint8_t tls = 0;  ///< tls_kind() of rank 0
};
struct Hello {
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  std::uint64_t restart = 0;
  std::uint32_t generation = 0;
  std::string run;
  std::uint8_t tls = 0;  ///< tls_kind() of the rank
  Digest nonce{};
  Digest instance{};  ///< of the process: the same for every attempt
  Digest proof{};
};
enum class Verdict : std::uint8_t {
  welcome = 0,
  refused = 1,    ///< permanently
  try_again = 2,  ///< rank 0 belongs to an earlier start or world, and will stop listening
};
struct HandshakeReply {
  Verdict verdict = Verdict::welcome;
  std::string text;
  Digest proof{};  ///< proves nothing if the hello proved nothing
};
struct ChannelOpened {
  std::uint16_t channel = 0;
  std::string name;
};
struct ChannelMessage {
  std::uint16_t channel = 0;
  std::int32_t from = 0;
  std::int32_t to = 0;  ///< -1: all others
  std::string_view message;
};

std::string encode(const Challenge& challenge);
std::string encode(const Hello& hello);
std::string encode(const HandshakeReply& reply);
std::string encode(const ChannelOpened& opened);
std::string encode(const ChannelMessage& sent);
std::string encode_rank(int rank);
/// The blobs of all ranks, each after its length.
std::string encode_blobs(std::span<const std::string> blobs);
/// The longest encode_blobs() of so many blobs that a frame can carry.
std::size_t max_blobs(std::size_t count) noexcept;

/// Empty unless the payload has exactly this format. The first three have a checksum, so damaged data isn't mistaken
/// for a rank's statement. A challenge of another version has only its version.
std::optional<Challenge> decode_challenge(std::string_view payload);
std::optional<Hello> decode_hello(std::string_view payload);
std::optional<HandshakeReply> decode_reply(std::string_view payload);
std::optional<ChannelOpened> decode_opened(std::string_view payload);
std::optional<ChannelMessage> decode_message(std::string_view payload);
std::optional<int> decode_rank(std::string_view payload);
/// Empty also if there are not `count` blobs.
std::optional<std::vector<std::string>> decode_blobs(std::string_view payload, std::size_t count);

}  // namespace tessera::comm::protocol
