// The authentication code against OpenSSL's own.
#include "tessera/comm/bootstrap/hmac.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <string>
#include <string_view>

namespace tessera::comm_test {
namespace {

TEST(Hmac, IsThatOfOpenSsl) {
  for (const std::size_t length : {0, 1, 55, 56, 63, 64, 65, 1000, 100'000}) {
    const comm::Digest key = comm::random_digest();
    std::string message(length, 'x');
    for (std::size_t i = 0; i < length; ++i) message[i] = static_cast<char>(i * 37);
    comm::Digest want{};
    unsigned size = 0;
    ASSERT_NE(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
                   reinterpret_cast<const unsigned char*>(message.data()), message.size(), want.data(), &size),
              nullptr);
    EXPECT_EQ(comm::prove(key, message), want) << length;
    message += '.';
    EXPECT_NE(comm::prove(key, message), want) << length;
  }
}

/// RFC 8018, by the authentication code: 20 ms for each guess of a token.
TEST(Hmac, StretchedKeyIsThatOfPbkdf2) {
  const comm::Digest key = comm::random_digest();
  const auto code = [&](std::string_view message) { return comm::prove(key, message); };
  comm::Digest round = code(std::string_view("tessera token\0\0\0\x01", 17));
  comm::Digest want = round;
  for (int i = 1; i < 40'000; ++i) {
    round = code({reinterpret_cast<const char*>(round.data()), round.size()});
    for (std::size_t byte = 0; byte < want.size(); ++byte) want[byte] ^= round[byte];
  }
  EXPECT_EQ(comm::stretch(key), want);
}

}  // namespace
}  // namespace tessera::comm_test
