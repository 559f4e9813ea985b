// The rates of codes that a frame between two hosts could carry, on one core: OpenSSL's MACs, XXH3 (a checksum, without
// a key), and AES-GCM, which TLS would use. A code is computed as a connection does it: one context with its key, a new
// nonce for each frame where the code takes one. The columns alternate for several rounds; each shows its best.
//
//   bench_frame_codes [ROUNDS]        default: 5
#include <openssl/evp.h>
#include <xxhash.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Compute = std::function<void(const std::vector<unsigned char>& bytes)>;

struct Code {
  std::string name;
  Compute compute;
};

void require(bool fine) {
  if (!fine) std::abort();
}

/// Codes of a cipher with a tag. `encrypt`: the bytes are encrypted, else only authenticated.
Compute cipher(const EVP_CIPHER* kind, bool encrypt) {
  const std::shared_ptr<EVP_CIPHER_CTX> context(EVP_CIPHER_CTX_new(), EVP_CIPHER_CTX_free);
  const std::array<unsigned char, 32> key{1, 2, 3};
  require(EVP_EncryptInit_ex(context.get(), kind, nullptr, key.data(), nullptr) == 1);
  return [context, encrypt, number = std::uint64_t{0},
          out = std::vector<unsigned char>(1 << 20)](const std::vector<unsigned char>& bytes) mutable {
    std::array<unsigned char, 12> nonce{};
    for (std::size_t i = 0; i < 8; ++i) nonce[i] = static_cast<unsigned char>(number >> (8 * i));
    ++number;
    int length = 0;
    std::array<unsigned char, 16> tag;
    require(EVP_EncryptInit_ex(context.get(), nullptr, nullptr, nullptr, nonce.data()) == 1 &&
            EVP_EncryptUpdate(context.get(), encrypt ? out.data() : nullptr, &length, bytes.data(),
                              static_cast<int>(bytes.size())) == 1 &&
            EVP_EncryptFinal_ex(context.get(), out.data(), &length) == 1 &&
            EVP_CIPHER_CTX_ctrl(context.get(), EVP_CTRL_AEAD_GET_TAG, 16, tag.data()) == 1);
  };
}

Compute mac(const char* name, const char* digest) {
  EVP_MAC* const kind = EVP_MAC_fetch(nullptr, name, nullptr);
  const std::shared_ptr<EVP_MAC_CTX> context(EVP_MAC_CTX_new(kind), EVP_MAC_CTX_free);
  EVP_MAC_free(kind);
  std::array<OSSL_PARAM, 2> parameters{OSSL_PARAM_construct_end(), OSSL_PARAM_construct_end()};
  if (digest != nullptr) parameters[0] = OSSL_PARAM_construct_utf8_string("digest", const_cast<char*>(digest), 0);
  const std::array<unsigned char, 32> key{1, 2, 3};
  require(EVP_MAC_init(context.get(), key.data(), key.size(), parameters.data()) == 1);
  return [context](const std::vector<unsigned char>& bytes) {
    std::array<unsigned char, 64> out;
    std::size_t length = 0;
    // Poly1305 needs a new key for each frame; the others keep theirs.
    require(EVP_MAC_init(context.get(), nullptr, 0, nullptr) == 1 &&
            EVP_MAC_update(context.get(), bytes.data(), bytes.size()) == 1 &&
            EVP_MAC_final(context.get(), out.data(), &length, out.size()) == 1);
  };
}

/// Seconds of one code.
double time_of(const Compute& compute, const std::vector<unsigned char>& bytes) {
  const std::size_t calls = (std::size_t{32} << 20) / (bytes.size() + 2000) + 1;
  const auto start = Clock::now();
  for (std::size_t i = 0; i < calls; ++i) compute(bytes);
  return std::chrono::duration<double>(Clock::now() - start).count() / static_cast<double>(calls);
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 5;
  volatile std::uint64_t sum = 0;
  const std::vector<Code> codes = {
      {"XXH3", [&sum](const auto& bytes) { sum = XXH3_64bits(bytes.data(), bytes.size()); }},
      {"GMAC, AES-128", cipher(EVP_aes_128_gcm(), false)},
      {"GMAC, AES-256", cipher(EVP_aes_256_gcm(), false)},
      {"ChaCha20-Poly1305, authentication only", cipher(EVP_chacha20_poly1305(), false)},
      {"HMAC-SHA256", mac("HMAC", "SHA256")},
      {"BLAKE2b", mac("BLAKE2BMAC", nullptr)},
      {"BLAKE2s", mac("BLAKE2SMAC", nullptr)},
      {"AES-128-GCM, encryption", cipher(EVP_aes_128_gcm(), true)},
      {"AES-256-GCM, encryption", cipher(EVP_aes_256_gcm(), true)},
      {"ChaCha20-Poly1305, encryption", cipher(EVP_chacha20_poly1305(), true)},
  };
  const std::vector<std::size_t> sizes = {64, 4 << 10, 64 << 10, 512 << 10};
  std::vector<std::vector<double>> best(codes.size(), std::vector<double>(sizes.size(), 1));
  for (int round = 0; round < rounds; ++round)
    for (std::size_t s = 0; s < sizes.size(); ++s)
      for (std::size_t c = 0; c < codes.size(); ++c)
        best[c][s] = std::min(best[c][s], time_of(codes[c].compute, std::vector<unsigned char>(sizes[s], 7)));
  std::printf("| code | 64 B (ns) | 4 KiB (us) | 64 KiB (us) | 512 KiB (us) | 512 KiB (GB/s) |\n");
  std::printf("| -- | -- | -- | -- | -- | -- |\n");
  for (std::size_t c = 0; c < codes.size(); ++c)
    std::printf("| %s | %.0f | %.2f | %.2f | %.1f | %.2f |\n", codes[c].name.c_str(), best[c][0] * 1e9,
                best[c][1] * 1e6, best[c][2] * 1e6, best[c][3] * 1e6,
                static_cast<double>(sizes[3]) / best[c][3] * 1e-9);
}
