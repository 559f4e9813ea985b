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

/// The port in a rank's address line, "+PORT ADDRESS" (see exchange()); 0 for another line.
inline std::uint16_t port_of(const std::string& line) {
  std::istringstream words(line);
  std::uint16_t port = 0;
  const bool is_address =
      words.get() == '+' && words >> port && words.get() == ' ' && line.find('\0') == std::string::npos;
  return is_address ? port : std::uint16_t{0};
}

class TamperedBootstrap : public Bootstrap {
 public:
  explicit TamperedBootstrap(std::shared_ptr<Bootstrap> real) : real_(std::move(real)), token_(real_->token()) {}
  int rank() const noexcept override { return real_->rank(); }
  int size() const noexcept override { return real_->size(); }
  bool in_process() const noexcept override { return real_->in_process(); }
  std::vector<std::string> all_gather(std::string_view blob) override {
    std::vector<std::string> all = real_->all_gather(blob);
    if (on_addresses && port_of(all.front()) != 0) on_addresses(all);
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
  std::vector<int> route(int to) const override { return real_->route(to); }

  std::string address = "127.0.0.1";
  std::vector<std::string> own_hosts;  ///< replaces the real hosts
  std::function<void(std::vector<std::string>&)> on_addresses;
  Token& own_token() { return token_; }

 private:
  const std::shared_ptr<Bootstrap> real_;
  Token token_;
};

}  // namespace tessera::tcp_test
