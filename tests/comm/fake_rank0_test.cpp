// Peers that answer in rank 0's place without knowing the token. None of them ends the search of a rank.
#include <atomic>
#include <memory>
#include <thread>

#include "tests/comm/handshake_bytes.h"
#include "tests/comm/rendezvous.h"

namespace tessera::comm_test {
namespace {

/// Answers in rank 0's place, without the token.
class FakeServer {
 public:
  using Answer = std::function<void(const UniqueFd& peer)>;
  FakeServer(UniqueFd listener, Answer answer) : listener_(std::move(listener)), answer_(std::move(answer)) {
    thread_ = std::thread([this] {
      while (!done_.load()) {
        pollfd entry{listener_.get(), POLLIN, 0};
        if (::poll(&entry, 1, 20) <= 0) continue;
        const UniqueFd peer(::accept(listener_.get(), nullptr, nullptr));
        answer_(peer);
        ++answered_;
      }
    });
  }
  explicit FakeServer(Answer answer) : FakeServer(listen_on_port(0), std::move(answer)) {}
  ~FakeServer() {
    done_.store(true);
    thread_.join();
  }
  int port() const { return port_of(listener_); }
  int answered() const { return answered_.load(); }

 private:
  UniqueFd listener_;
  const Answer answer_;
  std::atomic<int> answered_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

/// Sends `bytes` at once.
FakeServer::Answer says(const std::string& bytes) {
  return [bytes](const UniqueFd& peer) {
    send_bytes(peer, bytes);
    read_all(peer, 1s, kHelloBytes);
  };
}

/// Sends a challenge of this version, and replies to the hello without a valid proof.
FakeServer::Answer replies(char verdict, const std::string& text = "") {
  return [verdict, text](const UniqueFd& peer) {
    send_bytes(peer, challenge());
    if (read_all(peer, 1s, 2 * kHelloBytes).empty()) return;
    send_bytes(peer, frame('a', checked(std::string(1, verdict) + static_cast<char>(text.size()) + '\0' + text +
                                        std::string(32, '\0'))));
  };
}

std::string other_version() { return frame('c', checked("tessera:" + std::string("\x63\x00\x00\x00", 4))); }

/// The error of a rank whose deadline passes.
std::string error_at(const FakeServer& fake, std::chrono::milliseconds timeout = 1500ms) {
  RendezvousOptions one = options_of(1, 2, fake.port());
  one.timeout = timeout;
  const auto start = steady_clock::now();
  const std::string error = come(one).get().error;
  EXPECT_GE(steady_clock::now() - start, timeout) << "one such answer has ended the rank";
  EXPECT_TRUE(error.starts_with("Timeout: init: rank 1 of 2 found no rank 0 within")) << error;
  return error;
}

/// The answer "welcome" alone is not enough: rank 0 must prove that it knows the token too.
TEST(FakeRank0, IsNotTrusted) {
  const FakeServer fake(replies('\0'));
  const std::string error = error_at(fake);
  EXPECT_TRUE(error.ends_with(": authentication failed; use the same TESSERA_TOKEN on all ranks")) << error;
  EXPECT_GT(fake.answered(), 0);
}

/// Nor is its text trusted, which may target a terminal.
TEST(FakeRank0, ErrorTextIsIgnored) {
  const FakeServer fake(replies('\x01', "\x1b[31mring 0900-1234\x1b[0m"));
  const std::string error = error_at(fake);
  EXPECT_TRUE(error.ends_with(": authentication failed; use the same TESSERA_TOKEN on all ranks")) << error;
}

/// It answers for longer than a passing fault lasts; then rank 0 listens.
TEST(FakeRank0, IsOutlasted) {
  const std::vector<FakeServer::Answer> answers = {
      says(""),
      says(other_version()),
      says(frame('c', checked("tessera:" + std::string(4, '\0')))),
      says("SSH-2.0-OpenSSH_9.2\r\n"),
      says(std::string(4096, 'x')),
      says(std::string("c\xff\xff\xff\x7f", 5)),
      says(frame('r', "InvalidUsage\nyou are refused")),
      says(frame('a', checked(std::string("\x01\0\0", 3) + std::string(32, '\0')))),
      [](const UniqueFd&) {},
      replies('\0'),
      replies('\x01', "another world"),
      replies('\x02', "wait for ever"),
      replies('\x07')};
  std::vector<std::future<Outcome>> ones;
  std::vector<int> ports;
  {
    std::vector<std::unique_ptr<FakeServer>> fakes;
    for (const FakeServer::Answer& answer : answers) {
      fakes.push_back(std::make_unique<FakeServer>(answer));
      ports.push_back(fakes.back()->port());
      ones.push_back(come(options_of(1, 2, ports.back())));
    }
    std::this_thread::sleep_for(1500ms);
    for (std::size_t i = 0; i < answers.size(); ++i) EXPECT_GT(fakes[i]->answered(), 0) << i;
  }
  std::vector<std::future<Outcome>> zeros;
  for (const int port : ports) zeros.push_back(come(options_of(0, 2, port)));
  for (std::size_t i = 0; i < answers.size(); ++i) {
    EXPECT_EQ(zeros[i].get().error, "") << i;
    EXPECT_EQ(ones[i].get().error, "") << i;
  }
}

/// A host's name may have several addresses, and rank 0 listens at one of them.
TEST(FakeRank0, AtOtherAddressIsPassed) {
  UniqueFd listener(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in6 address = {};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const int port = free_port();
  address.sin6_port = htons(static_cast<std::uint16_t>(port));
  if (::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener.get(), 16) != 0)
    GTEST_SKIP() << "this host has no IPv6";
  const FakeServer fake(std::move(listener), says(other_version()));
  auto zero = come(options_of(0, 2, port));
  EXPECT_EQ(come(options_of(1, 2, port, "localhost")).get().error, "");
  EXPECT_EQ(zero.get().error, "");
}

TEST(FakeRank0, OtherVersionIsNamed) {
  const FakeServer fake(says(other_version()));
  EXPECT_NE(error_at(fake).find("it speaks version 99 of the protocol, rank 1 version 7; start all ranks with one"),
            std::string::npos);
}

TEST(FakeRank0, OtherServiceIsNamed) {
  const FakeServer fake(says("SSH-2.0-OpenSSH_9.2\r\n"));
  EXPECT_NE(error_at(fake, 300ms).find("the process that listens there is not rank 0 of this library"),
            std::string::npos);
}

TEST(FakeRank0, AllThatAnsweredAreNamed) {
  auto fake = std::make_unique<FakeServer>(says(other_version()));
  RendezvousOptions one = options_of(1, 2, fake->port());
  one.timeout = 1500ms;
  auto outcome = come(one);
  while (fake->answered() < 3) std::this_thread::sleep_for(1ms);
  fake.reset();
  const std::string error = outcome.get().error;
  EXPECT_NE(error.find(": Connection refused; before: it speaks version 99"), std::string::npos) << error;
}

TEST(FakeRank0, PersistentOneIsLogged) {
  const auto warnings = [](const FakeServer& fake, std::chrono::milliseconds timeout) {
    std::vector<std::string> texts;
    RendezvousOptions one = options_of(1, 2, fake.port());
    one.timeout = timeout;
    one.logger =
        std::make_shared<Logger>(LogLevel::warn, [&](LogLevel, std::string_view text) { texts.emplace_back(text); });
    come(one).get();
    return texts;
  };
  const FakeServer fake(replies('\x01'));
  const std::vector<std::string> texts = warnings(fake, 2s);
  ASSERT_EQ(texts.size(), 1U);
  EXPECT_NE(texts[0].find("rank 1 of 2 waits for rank 0 within 2s"), std::string::npos) << texts[0];
  EXPECT_NE(texts[0].find("use the same TESSERA_TOKEN on all ranks"), std::string::npos) << texts[0];
  EXPECT_TRUE(warnings(fake, 500ms).empty()) << "one such answer may be a passing fault";
}

}  // namespace
}  // namespace tessera::comm_test
