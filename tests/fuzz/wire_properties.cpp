#include "tests/fuzz/wire_properties.h"

#include <algorithm>

namespace tessera::fuzz {
namespace {

using namespace comm::protocol;

constexpr std::size_t kBlobs = 3;  // of a world of so many ranks

struct Frames {
  std::vector<std::string> all;
  bool broken = false;
  bool operator==(const Frames&) const = default;
};

/// Frames read from chunks of 1, 2, ... bytes, up to `step` at a time.
Frames read_in_chunks(std::string_view bytes, std::size_t longest, std::size_t step) {
  Frames frames;
  FrameParser reader(longest);
  std::size_t chunk = 1;
  for (std::size_t at = 0; at < bytes.size(); at += chunk) {
    chunk = step == 0 ? bytes.size() : chunk % step + 1;
    const auto on_frame = [&](Type type, std::string_view payload) {
      frames.all.push_back(static_cast<char>(type) + std::string(payload));
      return true;
    };
    const bool fine = reader.feed(bytes.substr(at, chunk), on_frame);
    if (frames.broken && fine) frames.all.emplace_back("a broken reader went on");
    frames.broken = !fine;
  }
  return frames;
}

/// The same frames by a second, independent reader.
Frames read_plainly(std::string_view bytes, std::size_t longest) {
  Frames frames;
  while (bytes.size() >= 5) {
    std::size_t length = 0;
    for (int i = 4; i >= 1; --i) length = length * 256 + static_cast<std::uint8_t>(bytes[static_cast<std::size_t>(i)]);
    frames.broken = std::string_view("chadrotlgp").find(bytes[0]) == std::string_view::npos || length > longest;
    if (frames.broken || bytes.size() < 5 + length) break;
    frames.all.push_back(bytes[0] + std::string(bytes.substr(5, length)));
    bytes.remove_prefix(5 + length);
  }
  return frames;
}

template <class T>
Again again(std::optional<T> (*decode)(std::string_view)) {
  return [decode](std::string_view payload) -> std::optional<std::string> {
    const std::optional<T> message = decode(payload);
    if (!message) return std::nullopt;
    return encode(*message);
  };
}

}  // namespace

std::vector<Again> messages() {
  return {[](std::string_view payload) -> std::optional<std::string> {
            const std::optional<Challenge> challenge = decode_challenge(payload);
            // Of other versions only the beginning of a challenge is defined.
            if (!challenge || challenge->version != kVersion) return std::nullopt;
            return encode(*challenge);
          },
          again(decode_hello),
          again(decode_reply),
          again(decode_opened),
          again(decode_message),
          [](std::string_view payload) -> std::optional<std::string> {
            const std::optional<int> rank = decode_rank(payload);
            if (!rank) return std::nullopt;
            return *rank < 0 ? "a negative rank" : encode_rank(*rank);
          },
          [](std::string_view payload) -> std::optional<std::string> {
            const std::optional<std::vector<std::string>> blobs = decode_blobs(payload, kBlobs);
            if (!blobs) return std::nullopt;
            return blobs->size() == kBlobs ? encode_blobs(*blobs) : "another number of blobs";
          }};
}

std::string broken_property(std::string_view bytes, const std::vector<Again>& messages) {
  for (const std::size_t longest : {kMaxHandshake, kMaxControl}) {
    const Frames expected = read_plainly(bytes, longest);
    for (const std::size_t step : {0, 1, 7})
      if (read_in_chunks(bytes, longest, step) != expected) return "frames depend on how the bytes are cut";
    for (const std::string& frame : expected.all)
      if (frame.size() > longest + 1) return "a frame is too long";
  }
  std::vector<std::string> payloads = read_plainly(bytes, kMaxControl).all;
  for (std::string& payload : payloads) payload.erase(0, 1);
  payloads.emplace_back(bytes);
  for (const std::string& payload : payloads)
    for (const Again& message : messages) {
      const std::optional<std::string> same = message(payload);
      if (same && *same != payload) return "a message is not what was sent";
    }
  return "";
}

std::vector<std::string> seeds() {
  Hello hello{.rank = 3, .size = 4, .restart = 2, .generation = 5, .run = "10.0.0.1.29500.abc.2"};
  hello.nonce.fill(0x5a);
  hello.proof.fill(0xa5);
  const std::vector<std::string> blobs = {"+29400 10.0.0.1", "", std::string(300, 'b')};
  const std::vector<std::pair<Type, std::string>> sent = {
      {Type::challenge, encode(Challenge{})},
      {Type::hello, encode(hello)},
      {Type::hello, encode(Hello{.run = std::string(kMaxText, 'r')})},
      {Type::reply, encode(HandshakeReply{})},
      {Type::reply, encode(HandshakeReply{.verdict = Verdict::try_again, .text = "rank 1 can't join"})},
      {Type::opened, encode(ChannelOpened{7, "world"})},
      {Type::message, encode(ChannelMessage{7, 2, -1, "all_reduce #12"})},
      {Type::message, encode(ChannelMessage{0, 0, 1, ""})},
      {Type::lost, encode_rank(3)},
      {Type::left, encode_rank(0)},
      {Type::probe, ""},
      {Type::data, std::string(2000, 'd')},
      {Type::data, encode_blobs(blobs)},
      {Type::refusal, "Timeout\ninit: of 3 ranks, rank 1 did not connect"}};
  std::vector<std::string> all;
  std::string whole_talk;
  for (const auto& [type, payload] : sent) {
    all.push_back(encode_frame(type, payload));
    all.push_back(payload);
    whole_talk += all[all.size() - 2];
  }
  all.push_back(whole_talk);
  return all;
}

}  // namespace tessera::fuzz
