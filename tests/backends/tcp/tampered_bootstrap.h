// A bootstrap that a test can manipulate.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/backends/tcp/support.h"

namespace tessera::tcp_test {

class TamperedBootstrap : public Bootstrap {
 public:
  explicit TamperedBootstrap(std::shared_ptr<Bootstrap> real) : real_(std::move(real)), token_(real_->token()) {}
  int rank() const noexcept override { return real_->rank(); }
  int size() const noexcept override { return real_->size(); }
  bool in_process() const noexcept override { return real_->in_process(); }
  std::vector<std::string> all_gather(std::string_view blob) override {
    std::vector<std::string> all = real_->all_gather(blob);
    if (count_++ == 0 && on_addresses) on_addresses(all);
    return all;
  }
  std::unique_ptr<ControlChannel> open_channel(std::string_view name, ControlEvents events) override {
    return real_->open_channel(name, std::move(events));
  }
  const std::vector<std::string>& hosts() const noexcept override {
    return own_hosts.empty() ? real_->hosts() : own_hosts;
  }
  const Token& token() const noexcept override { return token_; }
  std::string local_address() const override { return address; }

  std::string address = "127.0.0.1";
  std::vector<std::string> own_hosts;  ///< replaces the real hosts
  std::function<void(std::vector<std::string>&)> on_addresses;
  Token& own_token() { return token_; }

 private:
  const std::shared_ptr<Bootstrap> real_;
  Token token_;
  int count_ = 0;
};

/// The port in a rank's address line: "tessera-tcp-2 STREAMS CHECKSUM PORT ADDRESS".
inline std::uint16_t port_of(const std::string& line) {
  std::istringstream words(line);
  std::string format;
  int streams = 0, checksum = 0;
  std::uint16_t port = 0;
  words >> format >> streams >> checksum >> port;
  return port;
}

}  // namespace tessera::tcp_test
