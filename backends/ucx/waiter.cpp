#include "backends/ucx/waiter.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <ctime>

#include "tessera/base/error.h"

namespace tessera::comm::ucx {
namespace {

using namespace std::chrono_literals;
// Two threads of one rank may sleep here, and one may consume the wake-up that was meant for both.
constexpr std::chrono::nanoseconds kMaxSleep = 10ms;
constexpr std::chrono::nanoseconds kNap = 50us;  // if nothing would wake the thread

}  // namespace

UcpWaiter::UcpWaiter(ucp_worker_h worker, const int& unsent)
    : worker_(worker), unsent_(unsent), wake_fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (!wake_fd_) throw system_error("ucx: eventfd");
  if (ucp_worker_get_efd(worker, &worker_fd_) != UCS_OK) worker_fd_ = -1;  // poll() skips negative ones
}

bool UcpWaiter::arm() noexcept {
  eventfd_t wakes = 0;
  ::eventfd_read(wake_fd_.get(), &wakes);
  nap_ = worker_ == nullptr || worker_fd_ < 0 || unsent_ > 0;
  if (nap_) return true;
  return ucp_worker_arm(worker_) != UCS_ERR_BUSY;  // busy: data has arrived
}

void UcpWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  const auto time = std::clamp<std::chrono::nanoseconds>(at_most, 0ns, nap_ ? kNap : kMaxSleep);
  const timespec limit{0, static_cast<long>(time.count())};
  pollfd entries[] = {{worker_fd_, POLLIN, 0}, {wake_fd_.get(), POLLIN, 0}};
  ::ppoll(entries, 2, &limit, nullptr);
}

void UcpWaiter::wake() noexcept { ::eventfd_write(wake_fd_.get(), 1); }

}  // namespace tessera::comm::ucx
