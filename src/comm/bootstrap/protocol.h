// What goes over the control connections, as bytes. No socket is known here, so that it can be given any bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/comm/base_names.h"

namespace tessera::comm::protocol {

/// Of everything in this file: ranks of different versions refuse each other.
inline constexpr std::uint32_t kVersion = 4;

/// A frame is its type, the length of its payload (4 bytes, lowest first), and the payload. Once two ranks have proved
/// themselves to each other, frames are sealed, too (seal.h).
enum class Type : char {
  challenge = 'c',  ///< rank 0's first word
  hello = 'h',      ///< the other's answer
  answer = 'a',     ///< rank 0 takes it in, or says why not
  data = 'd',       ///< an exchange while the world is set up
  refusal = 'r',    ///< a text: the sender gives the start up
  opened = 'o',     ///< a rank has opened a channel; from rank 0: all have
  told = 't',       ///< a message on a channel
  lost = 'l',       ///< rank 0 says that a rank died
  left = 'g',       ///< a rank left in good order
  probe = 'p',      ///< to rank 0, and its answer: it is alive, and what came before was told on
};

inline constexpr std::size_t kHeadBytes = 5;
inline constexpr std::size_t kLongestHandshake = 1024;   ///< payload of a frame of somebody unproven
inline constexpr std::size_t kLongestControl = 1 << 16;  ///< ... of a frame on the channels
inline constexpr std::size_t kLongestExchange = 1 << 20;
inline constexpr std::size_t kLongestText = 400;  ///< names of runs and reasons; longer ones are cut
inline constexpr std::size_t kLongestName = 16;   ///< of a channel

struct Head {
  Type type{};
  std::uint32_t length = 0;
};
std::string encode_head(Type type, std::size_t length);
/// Nothing where `bytes` are none of ours, or announce more than `longest`.
std::optional<Head> decode_head(std::string_view bytes, std::size_t longest);
std::string encode_frame(Type type, std::string_view payload);

/// Cuts a stream of bytes into frames. Holds at most one frame that is not yet whole, and what it is fed.
class FrameParser {
 public:
  using Take = std::function<bool(Type type, std::string_view payload)>;
  explicit FrameParser(std::size_t longest) : longest_(longest) {}
  /// Gives each frame that is whole to `take`, until that says false. False, now and ever after: the bytes are none of
  /// ours, or `take` said so.
  bool feed(std::string_view bytes, const Take& take);

 private:
  const std::size_t longest_;
  std::string rest_;
  bool broken_ = false;
};

using Digest = std::array<std::uint8_t, 32>;

struct Challenge {
  std::uint32_t version = kVersion;
  Digest nonce{};
  Digest session{};  ///< of rank 0: other at each start
};
struct Hello {
  std::uint32_t rank = 0;
  std::uint32_t size = 0;
  std::uint64_t restart = 0;
  std::uint32_t generation = 0;
  std::string run;
  Digest nonce{};
  Digest instance{};  ///< of the process: the same whenever it comes again
  Digest proof{};
};
enum class Verdict : std::uint8_t {
  welcome = 0,
  refused = 1,    ///< for good
  try_again = 2,  ///< rank 0 is of an earlier start or world, and will give way
};
struct HandshakeReply {
  Verdict verdict = Verdict::welcome;
  std::string text;
  Digest proof{};  ///< proves nothing where the hello proved nothing
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
std::string encode(const HandshakeReply& answer);
std::string encode(const ChannelOpened& opened);
std::string encode(const ChannelMessage& told);
std::string encode_rank(int rank);

/// Nothing where the payload is not exactly one of ours. The first three have a checksum, so that what came damaged is
/// not taken for what another rank has to say. A challenge of another version has only its version.
std::optional<Challenge> decode_challenge(std::string_view payload);
std::optional<Hello> decode_hello(std::string_view payload);
std::optional<HandshakeReply> decode_answer(std::string_view payload);
std::optional<ChannelOpened> decode_opened(std::string_view payload);
std::optional<ChannelMessage> decode_told(std::string_view payload);
std::optional<int> decode_rank(std::string_view payload);

}  // namespace tessera::comm::protocol
