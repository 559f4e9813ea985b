#include "backends/tcp/frame.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <cstring>

#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

void require(bool fine) {
  if (!fine) throw SystemError("tcp: OpenSSL can't compute an authentication code (GMAC with AES-256)");
}

std::span<const std::byte> covered(const Frame& frame) {
  return std::as_bytes(std::span(&frame, 1)).first(offsetof(Frame, header_code));
}

FrameCode as_code(std::uint64_t checksum) {
  FrameCode code{};
  std::memcpy(code.data(), &checksum, sizeof(checksum));
  return code;
}

}  // namespace

std::string_view flaw(const Frame& frame) noexcept {
  if (frame.rts_sent > 1 || frame.tag.step >= 1U << 24) return "a frame with invalid fields";
  switch (frame.kind) {
    case FrameKind::eager:
      if (frame.total > kEagerLimit || frame.length != frame.total || frame.offset != 0)
        return "an eager message that is too large or incomplete";
      return "";
    case FrameKind::data:
      if (frame.length > kMaxChunk || frame.offset > frame.total || frame.length > frame.total - frame.offset ||
          (frame.length == 0 && frame.total != 0))
        return "a chunk outside its message";
      return "";
    case FrameKind::cts:
    case FrameKind::rts:
    case FrameKind::credit:
    case FrameKind::close:
      return frame.length == 0 ? "" : "a frame without payload that has a length";
  }
  return "a frame of unknown kind";
}

void FrameSeal::Free::operator()(evp_cipher_ctx_st* context) const noexcept { EVP_CIPHER_CTX_free(context); }

FrameSeal::FrameSeal(const Digest& key) : payloads_(true), context_(EVP_CIPHER_CTX_new()) {
  static_assert(sizeof(key) == 32);
  require(context_ != nullptr &&
          EVP_EncryptInit_ex(context_.get(), EVP_aes_256_gcm(), nullptr, key.data(), nullptr) == 1);
}

/// A nonce is used once under a key: two for each frame. AES-GCM with data that is only authenticated is GMAC.
void FrameSeal::begin_mac(bool payload) {
  std::array<unsigned char, 12> nonce{};  // of the length that GCM uses as it is
  const std::uint64_t number = 2 * number_ + (payload ? 1 : 0);
  std::memcpy(nonce.data(), &number, sizeof(number));
  require(EVP_EncryptInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data()) == 1);
}

void FrameSeal::add_to_mac(std::span<const std::byte> part) {
  int bytes = 0;
  require(EVP_EncryptUpdate(context_.get(), nullptr, &bytes, reinterpret_cast<const unsigned char*>(part.data()),
                            static_cast<int>(part.size())) == 1);
}

FrameCode FrameSeal::end_mac() {
  FrameCode code;
  int bytes = 0;
  require(EVP_EncryptFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(code.data()), &bytes) == 1 &&
          EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, static_cast<int>(code.size()), code.data()) == 1);
  return code;
}

FrameCode FrameSeal::header_code(const Frame& frame) {
  if (!keyed()) return as_code(checksum(covered(frame)));
  begin_mac(false);
  add_to_mac(covered(frame));
  return end_mac();
}

FrameCode FrameSeal::payload_code(std::span<const std::byte> payload) {
  if (!keyed()) return as_code(checksum(payload));
  begin_payload();
  add(payload);
  return payload_code();
}

FrameCode FrameSeal::payload_code() { return keyed() ? end_mac() : as_code(sum_.value()); }

bool same(const FrameCode& a, const FrameCode& b) noexcept { return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace tessera::comm::tcp
