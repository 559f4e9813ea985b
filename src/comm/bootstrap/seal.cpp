#include "tessera/comm/bootstrap/seal.h"

#include <cstring>
#include <span>

#include "tessera/base/checksum.h"

namespace tessera::comm {
namespace {

std::string bytes_of(std::uint64_t value, std::size_t count) {
  std::string bytes;
  for (std::size_t i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}

std::string checksum_of(std::string_view head) {
  return bytes_of(base::checksum(std::as_bytes(std::span(head))), Seal::kHeadBytes - protocol::kHeadBytes);
}

}  // namespace

Digest Seal::prove_frame(bool by_first, std::uint64_t number, std::string_view head, std::string_view payload) const {
  std::string message = bytes_of(number, sizeof(number));
  message.reserve(message.size() + 1 + head.size() + payload.size());
  message += by_first ? '0' : '1';
  message += head;
  message += payload;
  return prove(key_, message);
}

std::string Seal::close(protocol::Type type, std::string_view payload) {
  std::string bytes = protocol::encode_head(type, payload.size());
  const Digest proof = prove_frame(first_, sent_++, bytes, payload);
  bytes += checksum_of(bytes);
  bytes += payload;
  bytes.append(reinterpret_cast<const char*>(proof.data()), kProofBytes);
  return bytes;
}

std::optional<protocol::Head> Seal::open_head(std::string_view head, std::size_t longest) {
  if (head.size() != kHeadBytes ||
      checksum_of(head.substr(0, protocol::kHeadBytes)) != head.substr(protocol::kHeadBytes))
    return std::nullopt;
  return protocol::decode_head(head.substr(0, protocol::kHeadBytes), longest);
}

bool Seal::open(std::string_view head, std::string_view payload, std::string_view proof) {
  Digest expected = prove_frame(!first_, received_++, head.substr(0, protocol::kHeadBytes), payload);
  Digest given = expected;  // only its first bytes are sent
  if (proof.size() != kProofBytes) return false;
  std::memcpy(given.data(), proof.data(), kProofBytes);
  return same(given, expected);
}

SealedReader::Fed SealedReader::feed(std::string_view bytes, const protocol::FrameParser::FrameHandler& on_frame) {
  rest_ += bytes;
  std::string_view left = rest_;
  while (left.size() >= Seal::kHeadBytes) {
    const std::string_view head = left.substr(0, Seal::kHeadBytes);
    const std::optional<protocol::Head> decoded = Seal::open_head(head, longest_);
    if (!decoded) return Fed::damaged;
    if (left.size() < head.size() + decoded->length + Seal::kProofBytes) break;
    const std::string_view payload = left.substr(head.size(), decoded->length);
    left.remove_prefix(head.size() + payload.size());
    if (!seal_.open(head, payload, left.substr(0, Seal::kProofBytes))) return Fed::damaged;
    left.remove_prefix(Seal::kProofBytes);
    if (!on_frame(decoded->type, payload)) return Fed::refused;
  }
  rest_.erase(0, rest_.size() - left.size());
  return Fed::fine;
}

}  // namespace tessera::comm
