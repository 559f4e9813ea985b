#include "tessera/comm/bootstrap/hmac.h"

#define OPENSSL_SUPPRESS_DEPRECATED  // OpenSSL 3 prefers functions that look algorithms up: see prove()
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/rand.h>
#include <openssl/sha.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>

#include "tessera/base/checksum.h"
#include "tessera/base/error.h"

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

Digest random_digest() {
  Digest digest;
  if (RAND_bytes(digest.data(), static_cast<int>(digest.size())) != 1)
    throw SystemError("init: RAND_bytes failed; OpenSSL has no random numbers");
  return digest;
}

Digest prove(const Digest& key, std::string_view message) {
  // RFC 2104. OpenSSL's HMAC() finds its algorithm in tables that a handler of exit() frees, while the threads of a
  // communicator that the program has not destroyed still run. Its SHA-256 has no such state.
  constexpr std::size_t kBlock = SHA256_CBLOCK;
  const auto padded = [&](std::uint8_t pad) {
    std::array<std::uint8_t, kBlock> block{};
    std::ranges::copy(key, block.begin());
    for (std::uint8_t& byte : block) byte ^= pad;
    return block;
  };
  const auto hash = [](const std::array<std::uint8_t, kBlock>& first, const void* then, std::size_t bytes) {
    Digest digest;
    SHA256_CTX context;
    if (SHA256_Init(&context) != 1 || SHA256_Update(&context, first.data(), first.size()) != 1 ||
        SHA256_Update(&context, then, bytes) != 1 || SHA256_Final(digest.data(), &context) != 1)
      throw SystemError("init: SHA-256 failed");
    return digest;
  };
  const Digest inner = hash(padded(0x36), message.data(), message.size());
  return hash(padded(0x5c), inner.data(), inner.size());
}

Digest stretch(const Digest& key) {
  constexpr std::string_view kSalt = "tessera token";
  constexpr int kRounds = 40'000;
  Digest stretched;
  if (PKCS5_PBKDF2_HMAC(reinterpret_cast<const char*>(key.data()), static_cast<int>(key.size()),
                        reinterpret_cast<const unsigned char*>(kSalt.data()), static_cast<int>(kSalt.size()), kRounds,
                        EVP_sha256(), static_cast<int>(stretched.size()), stretched.data()) != 1)
    throw SystemError("init: PBKDF2 failed");
  return stretched;
}

bool same(const Digest& a, const Digest& b) { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

std::string to_hex(const Digest& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

Digest from_hex(std::string_view text) {
  const auto digit = [](char c) { return c >= '0' && c <= '9' ? c - '0' : (c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1); };
  Digest digest;
  if (text.size() != 2 * digest.size()) throw SystemError("init: the rendezvous file has no valid token");
  for (std::size_t i = 0; i < digest.size(); ++i) {
    const int high = digit(text[2 * i]);
    const int low = digit(text[2 * i + 1]);
    if (high < 0 || low < 0) throw SystemError("init: the rendezvous file has no valid token");
    digest[i] = static_cast<std::uint8_t>(high * 16 + low);
  }
  return digest;
}

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
