#include "tessera/base/process.h"

#include <pthread.h>
#include <sys/random.h>
#include <unistd.h>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

std::array<std::uint64_t, 2> random_bits() {
  std::array<std::uint64_t, 2> bits{};
  if (::getrandom(bits.data(), sizeof bits, 0) != static_cast<ssize_t>(sizeof bits)) throw system_error("getrandom");
  return bits;
}

}  // namespace

std::atomic<std::uint32_t> forks{0};

std::uint32_t count_forks() noexcept {
  [[maybe_unused]] static const int kCounts = ::pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1); });
  return forks_so_far();
}

ProcessIdentity this_process() {
  static const std::array<std::uint64_t, 2> kBits = random_bits();
  return {kBits[0], kBits[1], static_cast<std::uint64_t>(::getpid())};
}

}  // namespace tessera::base
