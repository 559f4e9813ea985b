// Bit flips on the way between two hosts: they cause an error that names the rank, never a wrong result.
#include <cstdlib>
#include <future>
#include <numeric>

#include "tessera/comm/registry.h"
#include "tests/backends/tcp/support.h"
#include "tests/backends/tcp/tampered_bootstrap.h"
#include "tests/harness/flipping_proxy.h"

namespace tessera::comm::tcp {
const comm::Backend& backend();
}

namespace tessera::tcp_test {
namespace {

using harness::FlippingProxy;

constexpr std::size_t kCount = 30'000;                   // an all_reduce that uses chunks and short messages
constexpr std::size_t kChallenge = 4 + 32, kProof = 32;  // of the accepting side, before its first frame
constexpr std::size_t kReply = 4 + 12 + 32 + 32 + 1;     // of the connecting side

struct Outcome {
  std::vector<std::string> errors;  // by rank
  std::vector<std::vector<float>> sums;
  bool flipped = false;
  bool right() const { return sums[0] == sums[1] && sums[0].front() == 3 && sums[0].back() == 3; }
};

/// Two ranks over a proxy: rank 0 connects to rank 1. `hosts`: the host of each rank.
Outcome run(std::optional<FlippingProxy::Flip> flip, std::vector<std::string> hosts = {"east", "west"},
            bool check = false) {
  Outcome outcome{{"", ""}, {std::vector<float>(kCount), std::vector<float>(kCount)}, false};
  std::optional<FlippingProxy> proxy;
  const auto bootstraps = make_thread_bootstraps(2, 20s);
  std::vector<std::thread> ranks;
  for (std::size_t r = 0; r < 2; ++r)
    ranks.emplace_back([&, r] {
      const auto tampered = std::make_shared<TamperedBootstrap>(bootstraps[r]);
      tampered->own_hosts = hosts;
      if (r == 0)
        tampered->on_addresses = [&](std::vector<std::string>& lines) {
          proxy.emplace(port_of(lines[1]), flip);
          lines[1] = "+" + std::to_string(proxy->port()) + " 127.0.0.1";
        };
      BackendOptions options;
      options.communicator.timeout = 10s;
      options.check = check;
      outcome.errors[r] = error_of([&] {
        const auto world = comm::tcp::backend().create(tampered, options);
        std::vector<float> in(kCount, static_cast<float>(r + 1));
        const View out{outcome.sums[r].data(), kCount, DType::f32, Device{}};
        for (int i = 0; i < 3; ++i)
          world->all_reduce({in.data(), kCount, DType::f32, Device{}}, out, ReduceOp::sum()).wait();
      });
    });
  for (std::thread& rank : ranks) rank.join();
  outcome.flipped = proxy && proxy->flipped();
  return outcome;
}

void expect_damage(const Outcome& outcome, const std::string& what,
                   const std::string& kind = " was changed on the way: its authentication code is wrong; check the ") {
  EXPECT_TRUE(outcome.flipped);
  for (const std::string& error : outcome.errors) {
    EXPECT_EQ(error.find("BackendError: tcp: "), 0U) << error;
    EXPECT_NE(error.find(what), std::string::npos) << error;
    EXPECT_NE(error.find(kind), std::string::npos) << error;
  }
}

/// A byte of a frame that rank 0 sends (to_listener) or receives.
FlippingProxy::Flip behind_handshake(bool to_listener, std::size_t at) {
  return {
      .connection = 0, .to_listener = to_listener, .at = (to_listener ? kReply : kChallenge + kProof) + at, .bit = 3};
}

class Streams : public testing::Test {
 protected:
  void SetUp() override { ::setenv("TESSERA_TCP_STREAMS", "1", 1); }
  void TearDown() override {
    ::unsetenv("TESSERA_TCP_STREAMS");
    ::unsetenv("TESSERA_TCP_CHECKSUM");
    ::unsetenv("TESSERA_TCP_MAC");
  }
};
using BitFlips = Streams;

TEST_F(BitFlips, NoFlipTransfersCorrectly) {  // control of the tests below
  const Outcome outcome = run(std::nullopt);
  EXPECT_EQ(outcome.errors, std::vector<std::string>(2));
  EXPECT_TRUE(outcome.right());
}

TEST_F(BitFlips, DamagedHeadersAreErrors) {
  for (const bool to_listener : {true, false})
    for (std::size_t at = 0; at < sizeof(comm::tcp::Frame); at += 7)
      expect_damage(run(behind_handshake(to_listener, at)), to_listener ? "from rank 0" : "from rank 1");
}

TEST_F(BitFlips, DamagedPayloadIsError) {
  for (const bool to_listener : {true, false})
    for (const std::size_t at : {20'000, 40'000, 90'000})
      expect_damage(run(behind_handshake(to_listener, at)), to_listener ? "from rank 0" : "from rank 1");
}

constexpr const char* kChecksumIsWrong = " is damaged: its checksum is wrong; check the network and the memory";

TEST_F(BitFlips, DamagedPayloadWithoutMacIsError) {
  ::setenv("TESSERA_TCP_MAC", "off", 1);
  for (const bool to_listener : {true, false})
    for (const std::size_t at : {20, 20'000})
      expect_damage(run(behind_handshake(to_listener, at)), to_listener ? "from rank 0" : "from rank 1",
                    kChecksumIsWrong);
}

TEST_F(BitFlips, DamagedPayloadOnOneHostIsErrorIfChecked) {
  const std::string what = "the payload of a message from rank 0";
  expect_damage(run(behind_handshake(true, 40'000), {"here", "here"}, true), what, kChecksumIsWrong);
  ::setenv("TESSERA_TCP_CHECKSUM", "1", 1);
  expect_damage(run(behind_handshake(true, 40'000), {"here", "here"}), what, kChecksumIsWrong);
}

TEST_F(BitFlips, DetectsWrongResultWithoutChecksum) {  // negative control
  ::setenv("TESSERA_TCP_MAC", "off", 1);
  ::setenv("TESSERA_TCP_CHECKSUM", "0", 1);
  const Outcome outcome = run(behind_handshake(true, 280'000));  // in the last all_reduce
  EXPECT_TRUE(outcome.flipped);
  EXPECT_EQ(outcome.errors, std::vector<std::string>(2));
  EXPECT_NE(outcome.sums[0], outcome.sums[1]);
}

TEST_F(BitFlips, HandshakeIsRetried) {
  for (const bool to_listener : {true, false})
    for (const std::size_t at : {1, 10, 30, 60, 80}) {
      if (at >= (to_listener ? kReply : kChallenge + kProof)) continue;
      const Outcome outcome = run(FlippingProxy::Flip{.connection = 0, .to_listener = to_listener, .at = at, .bit = 0});
      EXPECT_TRUE(outcome.flipped);
      EXPECT_EQ(outcome.errors, std::vector<std::string>(2));
      EXPECT_TRUE(outcome.right());
    }
}

}  // namespace
}  // namespace tessera::tcp_test
