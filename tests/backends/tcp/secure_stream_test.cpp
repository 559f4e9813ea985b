// Encrypted streams over a socket that takes few bytes at a time.
#include "tessera/comm/bootstrap/secure_stream.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <random>
#include <vector>

namespace tessera::comm {
namespace {

using State = SecureStream::State;

class SecureStreamTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds_), 0);
    const int few = 4096;
    for (const int fd : fds_) ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &few, sizeof(few));
    server_ = SecureStream(fds_[0], tls_, Digest{1}, true);
    client_ = SecureStream(fds_[1], tls_, Digest{1}, false);
    State server = State::wants_read, client = State::wants_read;
    for (int turn = 0; turn < 1000 && (server != State::done || client != State::done); ++turn) {
      client = client_.handshake();
      server = server_.handshake();
    }
    ASSERT_EQ(server, State::done) << server_.why();
    ASSERT_EQ(client, State::done) << client_.why();
  }
  ~SecureStreamTest() override {
    for (const int fd : fds_) ::close(fd);
  }

  /// What the server can read now.
  void read_all() {
    std::vector<std::byte> room(7777);
    for (SecureStream::Moved got; (got = server_.read({std::span(room)})).state == State::done;)
      got_.insert(got_.end(), room.begin(), room.begin() + static_cast<std::ptrdiff_t>(got.bytes));
  }

  const TlsContext tls_{TlsContext::Files{}};
  int fds_[2] = {-1, -1};
  SecureStream server_, client_;
  std::vector<std::byte> got_;
};

std::vector<std::byte> numbered(std::size_t bytes) {
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = static_cast<std::byte>(i * i >> 7);
  return all;
}

/// Whatever the writer reports as written has left: the reader gets it without another call of the writer.
TEST_F(SecureStreamTest, ReportsOnlyWhatHasLeft) {
  const std::vector<std::byte> all = numbered(3 << 20);
  std::mt19937 random(1);
  std::size_t written = 0, waits = 0;
  for (int turn = 0; written < all.size() && turn < 100000; ++turn) {
    // As a frame: a header, and content that is larger the next time.
    const std::span rest = std::span(all).subspan(written);
    const std::size_t header = std::min<std::size_t>(rest.size(), random() % 64);
    const std::size_t more = std::min<std::size_t>(rest.size() - header, (64 << 10) + random() % (256 << 10));
    const auto [bytes, state] = client_.write({rest.first(header), rest.subspan(header, more)});
    ASSERT_LE(bytes, header + more);
    ASSERT_TRUE(state == State::done || (state == State::wants_write && bytes == 0)) << static_cast<int>(state);
    written += bytes;
    waits += state == State::wants_write ? 1 : 0;
    if (state == State::wants_write || random() % 4 == 0) read_all();
    ASSERT_LE(got_.size(), all.size());
  }
  EXPECT_EQ(written, all.size());
  EXPECT_GT(waits, 10U) << "the socket was never full";
  read_all();
  ASSERT_EQ(got_.size(), all.size());
  EXPECT_TRUE(got_ == all);
}

TEST_F(SecureStreamTest, TellsThatReadingNeedsNoSocket) {
  const std::vector<std::byte> all = numbered(3000);
  EXPECT_EQ(client_.write({std::span(all).first(1000)}).bytes, 1000U);
  EXPECT_EQ(client_.write({std::span(all).subspan(1000)}).bytes, 2000U);
  EXPECT_FALSE(server_.has_pending());
  std::byte one;
  EXPECT_EQ(server_.read({std::span(&one, 1)}).bytes, 1U);
  EXPECT_TRUE(server_.has_pending());
  got_.push_back(one);
  read_all();
  EXPECT_FALSE(server_.has_pending());
  EXPECT_TRUE(got_ == all);
}

TEST_F(SecureStreamTest, EndOfTheOtherEndIsSaid) {
  ::shutdown(fds_[1], SHUT_RDWR);
  std::byte one;
  EXPECT_EQ(server_.read({std::span(&one, 1)}).state, State::ended);
  EXPECT_EQ(server_.read({std::span(&one, 1)}).state, State::ended) << "again";
}

TEST_F(SecureStreamTest, ForeignBytesAreDamage) {
  ASSERT_EQ(::send(fds_[1], "seventeen strange", 17, MSG_NOSIGNAL), 17);
  std::byte one;
  EXPECT_EQ(server_.read({std::span(&one, 1)}).state, State::damaged);
  EXPECT_NE(server_.why().find("TLS: "), std::string::npos) << server_.why();
}

}  // namespace
}  // namespace tessera::comm
