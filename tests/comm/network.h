// Plain TCP sockets, with which tests act as unauthenticated peers.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <random>
#include <string>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm_test {

inline sockaddr_in loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// Listens on 127.0.0.1; port 0 selects any free port.
inline comm::UniqueFd listen_on_port(int port) {
  comm::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const sockaddr_in address = loopback(port);
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(fd.get(), 16) != 0)
    throw base::system_error("listen");
  return fd;
}

inline int port_of(const comm::UniqueFd& fd) {
  sockaddr_in address = {};
  socklen_t length = sizeof(address);
  if (::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length) != 0)
    throw base::system_error("getsockname");
  return ntohs(address.sin_port);
}

/// A port on which nothing listens, below those that the kernel gives to connections: another test's connection does
/// not take it before the caller listens there.
inline int free_port() {
  static std::mt19937 random(std::random_device{}());
  std::uniform_int_distribution<int> any(10000, 32000);
  for (int i = 0; i < 100; ++i) {
    const int port = any(random);
    try {
      listen_on_port(port);
      return port;
    } catch (const base::SystemError&) {  // another process listens there
    }
  }
  return port_of(listen_on_port(0));
}

/// Empty if nothing listens.
inline comm::UniqueFd connect_to_port(int port) {
  comm::UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const sockaddr_in address = loopback(port);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) return {};
  return fd;
}

/// Waits until a socket listens.
inline comm::UniqueFd connect_when_open(int port) {
  for (int i = 0; i < 5000; ++i) {
    if (comm::UniqueFd fd = connect_to_port(port)) return fd;
    ::usleep(2000);
  }
  throw base::system_error("nobody listens");
}

inline void send_bytes(const comm::UniqueFd& fd, std::string_view bytes) {
  (void)::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

/// Returns the data received until the other side closes or `time` has passed.
inline std::string read_all(const comm::UniqueFd& fd, std::chrono::milliseconds time, std::size_t most = 1 << 20) {
  const auto until = std::chrono::steady_clock::now() + time;
  std::string all;
  while (std::chrono::steady_clock::now() < until && all.size() < most) {
    pollfd entry{fd.get(), POLLIN, 0};
    if (::poll(&entry, 1, 50) <= 0) continue;
    char buffer[1024];
    const ssize_t n = ::recv(fd.get(), buffer, std::min(sizeof(buffer), most - all.size()), 0);
    if (n <= 0) break;
    all.append(buffer, static_cast<std::size_t>(n));
  }
  return all;
}

/// Whether the other side closes within `time`, whatever data arrives before.
inline bool closed_within(const comm::UniqueFd& fd, std::chrono::milliseconds time) {
  const auto until = std::chrono::steady_clock::now() + time;
  while (std::chrono::steady_clock::now() < until) {
    pollfd entry{fd.get(), POLLIN, 0};
    if (::poll(&entry, 1, 50) <= 0) continue;
    char buffer[1024];
    if (::recv(fd.get(), buffer, sizeof(buffer), 0) <= 0) return true;
  }
  return false;
}

}  // namespace tessera::comm_test
