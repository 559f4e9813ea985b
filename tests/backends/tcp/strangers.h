// Peers that connect to a rank's port without belonging to its world, and worlds that must not notice them.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <vector>

#include "tests/backends/tcp/support.h"
#include "tests/backends/tcp/tampered_bootstrap.h"

namespace tessera::tcp_test {

/// From 127.0.0.1, or another address of the loopback network.
inline UniqueFd connect_to_port(std::uint16_t port, std::uint32_t from = INADDR_LOOPBACK) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(from);
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return {};
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) fd.reset();
  return fd;
}

inline void expect_working(const World& world) {
  for (const auto& a : world)
    for (const auto& b : world) {
      if (a == b) continue;
      const MessageTag tag{1, static_cast<std::uint32_t>(a->rank * 100 + b->rank), 0};
      const auto in = b->receive(a->rank, tag, 200'000);
      const auto out = a->send(b->rank, tag, 200'000);
      ASSERT_TRUE(poll_until(world, [&] { return in->done && out->done; })) << a->reason << b->reason;
      EXPECT_TRUE(intact(*in, 200'000));
    }
}

/// A world whose bootstraps are manipulated one by one.
inline WorldPlan tampered(int ranks, const std::function<void(TamperedBootstrap&)>& tamper) {
  WorldPlan plan;
  plan.ranks = ranks;
  plan.wrap = [tamper](std::shared_ptr<Bootstrap> real) {
    auto own = std::make_shared<TamperedBootstrap>(std::move(real));
    tamper(*own);
    return own;
  };
  return plan;
}

/// Connects 200 times; half of the connections are silent, half send garbage.
inline std::vector<UniqueFd> intrude(std::uint16_t port) {
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 200; ++i) {
    UniqueFd fd = connect_to_port(port);
    EXPECT_TRUE(fd);
    std::array<unsigned char, 300> garbage;
    for (std::size_t k = 0; k < garbage.size(); ++k)
      garbage[k] = static_cast<unsigned char>(i * 7 + static_cast<int>(k) * 13);
    if (i % 2 == 0) {
      EXPECT_GT(::send(fd.get(), garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
    }
    strangers.push_back(std::move(fd));
  }
  return strangers;
}

}  // namespace tessera::tcp_test
