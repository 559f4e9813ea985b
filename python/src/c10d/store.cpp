#include "c10d/store.h"

#include <algorithm>

namespace tessera::c10d_backend {

void TorchStore::set(const std::string& key, std::string_view value) {
  store_->set(prefix_ + key, std::vector<std::uint8_t>(value.begin(), value.end()));
}

std::optional<std::string> TorchStore::get(const std::string& key, std::chrono::steady_clock::time_point until) {
  using namespace std::chrono_literals;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
  try {
    store_->wait({prefix_ + key}, std::max(left, 1ms));
  } catch (const std::exception&) {
    // Its kinds of store report that time is up by different errors; any other one was not due to time.
    if (std::chrono::steady_clock::now() < until - 10ms) throw;
    return std::nullopt;
  }
  const std::vector<std::uint8_t> value = store_->get(prefix_ + key);
  return std::string(value.begin(), value.end());
}

}  // namespace tessera::c10d_backend
