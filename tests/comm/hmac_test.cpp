// The authentication code against OpenSSL's own.
#include "tessera/comm/bootstrap/hmac.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <string>

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

}  // namespace
}  // namespace tessera::comm_test
