#include "tessera/comm/bootstrap/protocol.h"

#include <algorithm>
#include <limits>
#include <span>

#include "tessera/base/checksum.h"

namespace tessera::comm::protocol {
namespace {

constexpr std::string_view kMagic = "tessera:";
constexpr std::string_view kTypes = "chadrotlgp";
constexpr std::uint32_t kFirstChecked = 4;  // version

class Writer {
 public:
  template <class T>
  Writer& number(T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i) bytes_ += static_cast<char>(value >> (8 * i));
    return *this;
  }
  Writer& raw(std::string_view bytes) {
    bytes_ += bytes;
    return *this;
  }
  Writer& digest(const Digest& digest) { return raw({reinterpret_cast<const char*>(digest.data()), digest.size()}); }
  Writer& text(std::string_view text) {
    text = text.substr(0, kMaxText);
    return number(static_cast<std::uint16_t>(text.size())).raw(text);
  }
  std::string finish() { return std::move(bytes_); }
  /// Appends the checksum of everything so far and returns the bytes.
  std::string finish_checked() {
    number(base::checksum(std::as_bytes(std::span(bytes_))));
    return finish();
  }

 private:
  std::string bytes_;
};

/// Reads past the end return zeros, and whole() is then false.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  std::string_view raw(std::size_t count) {
    if (count > bytes_.size()) {
      short_ = true;
      bytes_ = {};
      return {};
    }
    const std::string_view taken = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return taken;
  }
  template <class T>
  T number() {
    const std::string_view taken = raw(sizeof(T));
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < taken.size(); ++i)
      value |= std::uint64_t{static_cast<std::uint8_t>(taken[i])} << (8 * i);
    return static_cast<T>(value);
  }
  Digest digest() {
    Digest value{};
    const std::string_view taken = raw(value.size());
    std::copy(taken.begin(), taken.end(), value.begin());
    return value;
  }
  std::string text(std::size_t longest = kMaxText) {
    const auto length = number<std::uint16_t>();
    if (length > longest) short_ = true;
    return short_ ? std::string() : std::string(raw(length));
  }
  std::string_view rest() { return raw(bytes_.size()); }
  bool whole() const { return !short_ && bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool short_ = false;
};

/// Verifies and removes the checksum of finish_checked(); empty if it is wrong.
std::optional<std::string_view> checked(std::string_view bytes) {
  constexpr std::size_t kSum = sizeof(std::uint64_t);
  if (bytes.size() < kSum) return std::nullopt;
  const std::string_view content = bytes.substr(0, bytes.size() - kSum);
  if (Reader(bytes.substr(content.size())).number<std::uint64_t>() != base::checksum(std::as_bytes(std::span(content))))
    return std::nullopt;
  return content;
}

template <class T>
std::optional<T> if_whole(const Reader& reader, T value) {
  return reader.whole() ? std::optional<T>(std::move(value)) : std::nullopt;
}

}  // namespace

std::string encode_head(Type type, std::size_t length) {
  return Writer().number(static_cast<char>(type)).number(static_cast<std::uint32_t>(length)).finish();
}

std::optional<Head> decode_head(std::string_view bytes, std::size_t longest) {
  Reader reader(bytes);
  const auto type = static_cast<char>(reader.number<std::uint8_t>());
  const auto length = reader.number<std::uint32_t>();
  if (!reader.whole() || kTypes.find(type) == std::string_view::npos || length > longest) return std::nullopt;
  return Head{static_cast<Type>(type), length};
}

std::string encode_frame(Type type, std::string_view payload) {
  return encode_head(type, payload.size()).append(payload);
}

bool FrameParser::feed(std::string_view bytes, const FrameHandler& on_frame) {
  if (broken_) return false;
  rest_ += bytes;
  std::size_t at = 0;
  while (rest_.size() - at >= kHeadBytes) {
    const std::optional<Head> head = decode_head(std::string_view(rest_).substr(at, kHeadBytes), longest_);
    broken_ = !head;
    if (broken_) break;
    if (rest_.size() - at - kHeadBytes < head->length) break;
    broken_ = !on_frame(head->type, std::string_view(rest_).substr(at + kHeadBytes, head->length));
    if (broken_) break;
    at += kHeadBytes + head->length;
  }
  if (broken_)
    rest_.clear();
  else
    rest_.erase(0, at);
  return !broken_;
}

std::string encode(const Challenge& challenge) {
  return Writer()
      .raw(kMagic)
      .number(challenge.version)
      .digest(challenge.nonce)
      .digest(challenge.session)
      .finish_checked();
}

std::optional<Challenge> decode_challenge(std::string_view payload) {
  Reader reader(payload);
  if (reader.raw(kMagic.size()) != kMagic || payload.size() < kMagic.size() + sizeof(std::uint32_t))
    return std::nullopt;
  Challenge challenge;
  challenge.version = reader.number<std::uint32_t>();
  const std::optional<std::string_view> content = checked(payload);
  if (!content && (challenge.version == 0 || challenge.version >= kFirstChecked)) return std::nullopt;
  if (challenge.version != kVersion) return challenge;
  reader = Reader(content->substr(kMagic.size() + sizeof(challenge.version)));
  challenge.nonce = reader.digest();
  challenge.session = reader.digest();
  return if_whole(reader, challenge);
}

std::string encode(const Hello& hello) {
  return Writer()
      .number(hello.rank)
      .number(hello.size)
      .number(hello.restart)
      .number(hello.generation)
      .text(hello.run)
      .digest(hello.nonce)
      .digest(hello.instance)
      .digest(hello.proof)
      .finish_checked();
}

std::optional<Hello> decode_hello(std::string_view payload) {
  const std::optional<std::string_view> content = checked(payload);
  if (!content) return std::nullopt;
  Reader reader(*content);
  Hello hello;
  hello.rank = reader.number<std::uint32_t>();
  hello.size = reader.number<std::uint32_t>();
  hello.restart = reader.number<std::uint64_t>();
  hello.generation = reader.number<std::uint32_t>();
  hello.run = reader.text();
  hello.nonce = reader.digest();
  hello.instance = reader.digest();
  hello.proof = reader.digest();
  return if_whole(reader, std::move(hello));
}

std::string encode(const HandshakeReply& reply) {
  return Writer()
      .number(static_cast<std::uint8_t>(reply.verdict))
      .text(reply.text)
      .digest(reply.proof)
      .finish_checked();
}

std::optional<HandshakeReply> decode_reply(std::string_view payload) {
  const std::optional<std::string_view> content = checked(payload);
  if (!content) return std::nullopt;
  Reader reader(*content);
  HandshakeReply reply;
  const auto verdict = reader.number<std::uint8_t>();
  if (verdict > static_cast<std::uint8_t>(Verdict::try_again)) return std::nullopt;
  reply.verdict = static_cast<Verdict>(verdict);
  reply.text = reader.text();
  reply.proof = reader.digest();
  return if_whole(reader, std::move(reply));
}

std::string encode(const ChannelOpened& opened) {
  return Writer().number(opened.channel).text(std::string_view(opened.name).substr(0, kMaxName)).finish();
}

std::optional<ChannelOpened> decode_opened(std::string_view payload) {
  Reader reader(payload);
  ChannelOpened opened;
  opened.channel = reader.number<std::uint16_t>();
  opened.name = reader.text(kMaxName);
  return if_whole(reader, std::move(opened));
}

std::string encode(const ChannelMessage& sent) {
  return Writer()
      .number(sent.channel)
      .number(static_cast<std::uint32_t>(sent.from))
      .number(static_cast<std::uint32_t>(sent.to))
      .raw(sent.message)
      .finish();
}

std::optional<ChannelMessage> decode_message(std::string_view payload) {
  Reader reader(payload);
  ChannelMessage sent;
  sent.channel = reader.number<std::uint16_t>();
  sent.from = static_cast<std::int32_t>(reader.number<std::uint32_t>());
  sent.to = static_cast<std::int32_t>(reader.number<std::uint32_t>());
  sent.message = reader.rest();
  return if_whole(reader, sent);
}

std::string encode_rank(int rank) { return Writer().number(static_cast<std::uint32_t>(rank)).finish(); }

std::optional<int> decode_rank(std::string_view payload) {
  Reader reader(payload);
  const auto rank = reader.number<std::uint32_t>();
  if (!reader.whole() || rank > static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max()))
    return std::nullopt;
  return static_cast<int>(rank);
}

}  // namespace tessera::comm::protocol
