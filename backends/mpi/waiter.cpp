#include "backends/mpi/waiter.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <ctime>

#include "tessera/base/error.h"

namespace tessera::comm::mpi {
namespace {

using namespace std::chrono_literals;
constexpr std::chrono::nanoseconds kShortest = 20us;
constexpr int kMostDoublings = 5;
constexpr auto kDrives = 1s;  // after this a peer is probably late, and the shortest naps suffice

}  // namespace

PollingWaiter::PollingWaiter() : wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_fd_) throw system_error("mpi: eventfd");
}

bool PollingWaiter::arm() noexcept {
  std::uint64_t wakes = 0;
  [[maybe_unused]] const ssize_t none = ::read(wake_fd_.get(), &wakes, sizeof(wakes));
  if (naps_ < 4 * kMostDoublings && !driving_) ++naps_;
  if (driving_ && driving_since_ == Clock::time_point{}) driving_since_ = Clock::now();
  yields_ = driving_ && Clock::now() - driving_since_ < kDrives;
  return true;
}

void PollingWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  if (yields_) return void(::sched_yield());
  const auto nap = kShortest * (1 << std::min(naps_ / 4, kMostDoublings));
  const timespec limit{0, static_cast<long>(std::clamp<std::chrono::nanoseconds>(at_most, 0ns, nap).count())};
  pollfd entry{wake_fd_.get(), POLLIN, 0};
  ::ppoll(&entry, 1, &limit, nullptr);
}

void PollingWaiter::wake() noexcept {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t full = ::write(wake_fd_.get(), &one, sizeof(one));
}

}  // namespace tessera::comm::mpi
