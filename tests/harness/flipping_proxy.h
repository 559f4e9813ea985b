// A TCP proxy on the loopback interface that flips one bit of the data that it forwards.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <optional>
#include <thread>
#include <vector>

namespace tessera::harness {

class FlippingProxy {
 public:
  /// The bit to flip, in the byte at offset `at` of one direction of one connection.
  struct Flip {
    int connection = 0;        ///< numbered in the order of acceptance
    bool to_listener = false;  ///< false: data that the listener behind the proxy sends
    std::size_t at = 0;
    int bit = 0;
  };

  /// Forwards to 127.0.0.1:`target`. Without `flip` it changes nothing.
  explicit FlippingProxy(int target, std::optional<Flip> flip = std::nullopt) : target_(target), flip_(flip) {
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in any = loopback(0);
    if (::bind(listener_, reinterpret_cast<const sockaddr*>(&any), sizeof(any)) == 0) ::listen(listener_, 64);
    thread_ = std::thread([this] { run(); });
  }
  ~FlippingProxy() {
    stop_.store(true);
    thread_.join();
    for (const Direction& direction : directions_) {
      ::close(direction.from);
      if (direction.to_listener) ::close(direction.to);
    }
    ::close(listener_);
  }
  FlippingProxy(const FlippingProxy&) = delete;
  FlippingProxy& operator=(const FlippingProxy&) = delete;

  int port() const {
    sockaddr_in address = {};
    socklen_t length = sizeof(address);
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length);
    return ntohs(address.sin_port);
  }
  /// Changes the target, for listeners that choose a free port after the proxy has chosen its own.
  void aim(int target) { target_.store(target); }
  /// Whether the bit has been flipped.
  bool flipped() const { return flipped_.load(); }
  int connections() const { return connections_.load(); }

 private:
  struct Direction {
    int from = -1;
    int to = -1;
    int connection = 0;
    bool to_listener = false;
    bool open = true;
    std::size_t passed = 0;
  };

  static sockaddr_in loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  void accept_one() {
    const int near = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    const int far = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(target_.load());
    if (near < 0 || ::connect(far, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      ::close(near);
      ::close(far);
      return;
    }
    const int number = connections_.fetch_add(1);
    directions_.push_back({.from = near, .to = far, .connection = number, .to_listener = true});
    directions_.push_back({.from = far, .to = near, .connection = number, .to_listener = false});
  }

  void forward(Direction& direction) {
    std::array<char, 65536> bytes{};
    const ssize_t count = ::recv(direction.from, bytes.data(), bytes.size(), 0);
    if (count <= 0) {
      direction.open = false;
      ::shutdown(direction.to, SHUT_WR);
      return;
    }
    const auto length = static_cast<std::size_t>(count);
    if (flip_ && flip_->connection == direction.connection && flip_->to_listener == direction.to_listener &&
        flip_->at >= direction.passed && flip_->at < direction.passed + length) {
      char& byte = bytes[flip_->at - direction.passed];
      byte = static_cast<char>(byte ^ (1 << flip_->bit));
      flipped_.store(true);
    }
    direction.passed += length;
    for (std::size_t at = 0; at < length;) {
      const ssize_t sent = ::send(direction.to, bytes.data() + at, length - at, MSG_NOSIGNAL);
      if (sent <= 0) break;  // that side has closed; the other side sees the end of its own connection
      at += static_cast<std::size_t>(sent);
    }
  }

  void run() {
    while (!stop_.load()) {
      std::vector<pollfd> entries{{listener_, POLLIN, 0}};
      for (const Direction& direction : directions_)
        entries.push_back({direction.open ? direction.from : -1, POLLIN, 0});
      if (::poll(entries.data(), entries.size(), 20) <= 0) continue;
      for (std::size_t i = 1; i < entries.size(); ++i)
        if (entries[i].revents != 0) forward(directions_[i - 1]);
      if (entries[0].revents != 0) accept_one();
    }
  }

  std::atomic<int> target_;
  const std::optional<Flip> flip_;
  int listener_ = -1;
  std::atomic<bool> stop_{false};
  std::atomic<bool> flipped_{false};
  std::atomic<int> connections_{0};
  std::vector<Direction> directions_;
  std::thread thread_;
};

}  // namespace tessera::harness
