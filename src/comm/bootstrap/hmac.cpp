#include "tessera/comm/bootstrap/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "tessera/base/error.h"

namespace tessera::comm {

Digest random_digest() {
  Digest digest;
  if (RAND_bytes(digest.data(), static_cast<int>(digest.size())) != 1)
    throw SystemError("init: RAND_bytes failed; OpenSSL has no random numbers");
  return digest;
}

Digest prove(const Digest& key, std::string_view message) {
  Digest digest;
  unsigned length = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(message.data());
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes, message.size(), digest.data(), &length) ==
          nullptr ||
      length != digest.size())
    throw SystemError("init: HMAC failed");
  return digest;
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

}  // namespace tessera::comm
