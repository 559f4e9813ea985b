#include "tessera/comm/bootstrap/protocol.h"

#include <algorithm>
#include <limits>
#include <tuple>

#include "tessera/base/checksum.h"

namespace tessera::comm::protocol {
namespace {

constexpr std::string_view kMagic = "tessera:";
constexpr std::string_view kTypes = "chadrotlgp";
constexpr std::uint32_t kFirstChecked = 4;  // version

class Writer {
 public:
  template <class T>
  void field(T number) {
    for (std::size_t i = 0; i < sizeof(T); ++i) bytes_ += static_cast<char>(number >> (8 * i));
  }
  void field(Verdict verdict) { field(static_cast<std::uint8_t>(verdict)); }
  void field(const Digest& digest) {
    field(std::string_view(reinterpret_cast<const char*>(digest.data()), digest.size()));
  }
  void field(const std::string& text) {
    const std::string_view sent = std::string_view(text).substr(0, kMaxText);
    field(static_cast<std::uint16_t>(sent.size()));
    field(sent);
  }
  void field(std::string_view bytes) { bytes_ += bytes; }
  std::string finish() { return std::move(bytes_); }
  /// Appends the checksum of everything so far and returns the bytes.
  std::string finish_checked() {
    field(base::checksum(std::as_bytes(std::span(bytes_))));
    return finish();
  }

 private:
  std::string bytes_;
};

/// Reads what Writer wrote. Reads past the end return zeros, and whole() is then false.
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
  template <class T>
  void field(T& value) {
    value = number<T>();
  }
  void field(Verdict& verdict) {
    const auto value = number<std::uint8_t>();
    short_ |= value > static_cast<std::uint8_t>(Verdict::try_again);
    verdict = static_cast<Verdict>(value);
  }
  void field(Digest& digest) {
    const std::string_view taken = raw(digest.size());
    std::ranges::copy(taken, digest.begin());
  }
  void field(std::string& text) {
    const auto length = number<std::uint16_t>();
    short_ |= length > kMaxText;
    if (!short_) text = raw(length);
  }
  void field(std::string_view& rest) { rest = raw(bytes_.size()); }
  bool failed() const { return short_; }
  bool whole() const { return !short_ && bytes_.empty(); }

 private:
  std::string_view bytes_;
  bool short_ = false;
};

/// The fields of each message, in the order of their bytes.
template <class M>
constexpr std::tuple kFields{};
template <>
constexpr std::tuple kFields<Challenge>{&Challenge::version, &Challenge::nonce, &Challenge::session, &Challenge::tls};
template <>
constexpr std::tuple kFields<Hello>{&Hello::rank, &Hello::size,  &Hello::restart,  &Hello::generation, &Hello::run,
                                    &Hello::tls,  &Hello::nonce, &Hello::instance, &Hello::proof};
template <>
constexpr std::tuple kFields<HandshakeReply>{&HandshakeReply::verdict, &HandshakeReply::text, &HandshakeReply::proof};
template <>
constexpr std::tuple kFields<ChannelOpened>{&ChannelOpened::channel, &ChannelOpened::name};
template <>
constexpr std::tuple kFields<ChannelMessage>{&ChannelMessage::channel, &ChannelMessage::from, &ChannelMessage::to,
                                             &ChannelMessage::message};

template <class M>
Writer written(const M& message, std::string_view prefix = {}) {
  Writer writer;
  writer.field(prefix);
  std::apply([&](auto... member) { (writer.field(message.*member), ...); }, kFields<M>);
  return writer;
}

/// Empty unless `bytes` are exactly one message.
template <class M>
std::optional<M> read(std::string_view bytes) {
  Reader reader(bytes);
  M message;
  std::apply([&](auto... member) { (reader.field(message.*member), ...); }, kFields<M>);
  return reader.whole() ? std::optional(std::move(message)) : std::nullopt;
}

/// Verifies and removes the checksum of finish_checked(); empty if it is wrong.
std::optional<std::string_view> checked(std::string_view bytes) {
  constexpr std::size_t kSum = sizeof(std::uint64_t);
  if (bytes.size() < kSum) return std::nullopt;
  const std::string_view content = bytes.substr(0, bytes.size() - kSum);
  if (Reader(bytes.substr(content.size())).number<std::uint64_t>() != base::checksum(std::as_bytes(std::span(content))))
    return std::nullopt;
  return content;
}

template <class M>
std::optional<M> read_checked(std::string_view bytes) {
  const std::optional<std::string_view> content = checked(bytes);
  return content ? read<M>(*content) : std::nullopt;
}

}  // namespace

std::string encode_head(Type type, std::size_t length) {
  Writer writer;
  writer.field(static_cast<char>(type));
  writer.field(static_cast<std::uint32_t>(length));
  return writer.finish();
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

std::string encode(const Challenge& challenge) { return written(challenge, kMagic).finish_checked(); }

std::optional<Challenge> decode_challenge(std::string_view payload) {
  Reader reader(payload);
  if (reader.raw(kMagic.size()) != kMagic || payload.size() < kMagic.size() + sizeof(std::uint32_t))
    return std::nullopt;
  Challenge challenge;
  challenge.version = reader.number<std::uint32_t>();
  const std::optional<std::string_view> content = checked(payload);
  if (!content && (challenge.version == 0 || challenge.version >= kFirstChecked)) return std::nullopt;
  if (challenge.version != kVersion) return challenge;
  return read<Challenge>(content->substr(kMagic.size()));
}

std::string encode(const Hello& hello) { return written(hello).finish_checked(); }
std::optional<Hello> decode_hello(std::string_view payload) { return read_checked<Hello>(payload); }

std::string encode(const HandshakeReply& reply) { return written(reply).finish_checked(); }
std::optional<HandshakeReply> decode_reply(std::string_view payload) { return read_checked<HandshakeReply>(payload); }

std::string encode(const ChannelOpened& opened) {
  return written(ChannelOpened{opened.channel, opened.name.substr(0, kMaxName)}).finish();
}

std::optional<ChannelOpened> decode_opened(std::string_view payload) {
  std::optional<ChannelOpened> opened = read<ChannelOpened>(payload);
  if (opened && opened->name.size() > kMaxName) return std::nullopt;
  return opened;
}

std::string encode(const ChannelMessage& sent) { return written(sent).finish(); }
std::optional<ChannelMessage> decode_message(std::string_view payload) { return read<ChannelMessage>(payload); }

std::string encode_rank(int rank) {
  Writer writer;
  writer.field(static_cast<std::uint32_t>(rank));
  return writer.finish();
}

std::optional<int> decode_rank(std::string_view payload) {
  Reader reader(payload);
  const auto rank = reader.number<std::uint32_t>();
  if (!reader.whole() || rank > static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max()))
    return std::nullopt;
  return static_cast<int>(rank);
}

std::string encode_blobs(std::span<const std::string> blobs) {
  Writer writer;
  for (const std::string& blob : blobs) {
    writer.field(static_cast<std::uint32_t>(blob.size()));
    writer.field(std::string_view(blob));
  }
  return writer.finish();
}

std::size_t max_blobs(std::size_t count) noexcept {
  constexpr std::size_t kOne = kMaxExchange + sizeof(std::uint32_t);
  constexpr std::size_t kFrame = std::numeric_limits<std::uint32_t>::max();
  return count < kFrame / kOne ? count * kOne : kFrame;
}

std::optional<std::vector<std::string>> decode_blobs(std::string_view payload, std::size_t count) {
  Reader reader(payload);
  std::vector<std::string> blobs;
  for (std::size_t i = 0; i < count && !reader.failed(); ++i)
    blobs.emplace_back(reader.raw(reader.number<std::uint32_t>()));
  return reader.whole() ? std::optional(std::move(blobs)) : std::nullopt;
}

}  // namespace tessera::comm::protocol
