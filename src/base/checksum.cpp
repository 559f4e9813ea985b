#include "tessera/base/checksum.h"

#include <xxhash.h>

#include <new>

namespace tessera::base {

struct RunningChecksum::State {
  struct Free {
    void operator()(XXH3_state_t* state) const noexcept { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> hash{XXH3_createState()};
};

std::uint64_t checksum(std::span<const std::byte> bytes) noexcept { return XXH3_64bits(bytes.data(), bytes.size()); }

RunningChecksum::RunningChecksum() : state_(std::make_unique<State>()) {
  if (state_->hash == nullptr) throw std::bad_alloc();
  reset();
}
RunningChecksum::RunningChecksum(RunningChecksum&&) noexcept = default;
RunningChecksum& RunningChecksum::operator=(RunningChecksum&&) noexcept = default;
RunningChecksum::~RunningChecksum() = default;

void RunningChecksum::reset() noexcept { XXH3_64bits_reset(state_->hash.get()); }
void RunningChecksum::add(std::span<const std::byte> bytes) noexcept {
  XXH3_64bits_update(state_->hash.get(), bytes.data(), bytes.size());
}
std::uint64_t RunningChecksum::value() const noexcept { return XXH3_64bits_digest(state_->hash.get()); }

}  // namespace tessera::base
