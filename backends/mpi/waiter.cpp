#include "backends/mpi/waiter.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <ctime>

#include "tessera/base/error.h"

namespace tessera::comm::mpi {
namespace {

using namespace std::chrono_literals;
constexpr std::chrono::nanoseconds kShortest = 20us;
constexpr int kMaxDoublings = 5;
constexpr auto kYieldTime = 1s;  // after this a peer is probably late, and the shortest naps suffice

}  // namespace

PollingWaiter::PollingWaiter() : wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_fd_) throw system_error("mpi: eventfd");
}

bool PollingWaiter::arm() noexcept {
  eventfd_t wakes = 0;
  ::eventfd_read(wake_fd_.get(), &wakes);
  if (naps_ < 4 * kMaxDoublings && !collective_in_flight_) ++naps_;
  if (collective_in_flight_ && waiting_since_ == Clock::time_point{}) waiting_since_ = Clock::now();
  yields_ = collective_in_flight_ && Clock::now() - waiting_since_ < kYieldTime;
  return true;
}

void PollingWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  if (yields_) return void(::sched_yield());
  const auto nap = kShortest * (1 << std::min(naps_ / 4, kMaxDoublings));
  const timespec limit{0, static_cast<long>(std::clamp<std::chrono::nanoseconds>(at_most, 0ns, nap).count())};
  pollfd entry{wake_fd_.get(), POLLIN, 0};
  ::ppoll(&entry, 1, &limit, nullptr);
}

void PollingWaiter::wake() noexcept { ::eventfd_write(wake_fd_.get(), 1); }

}  // namespace tessera::comm::mpi
