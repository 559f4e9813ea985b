#include "backends/tcp/transport.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"

namespace tessera::comm::tcp {
namespace {

/// The value of wakes_ that arm() saw; the same thread then calls sleep().
thread_local std::uint32_t t_seen = 0;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables): a thread's own

constexpr std::chrono::nanoseconds kShort = std::chrono::milliseconds(1);

}  // namespace

EpollWaiter::EpollWaiter() : epoll_(::epoll_create1(EPOLL_CLOEXEC)), woken_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!epoll_ || !woken_) throw system_error("tcp: epoll_create1 or eventfd");
}

bool EpollWaiter::arm() noexcept {
  t_seen = wakes_.load();
  // A sleeping thread may not have seen the eventfd yet; a thread about to sleep compares wakes_.
  if (sleeping_.load() != 0) return true;
  eventfd_t count = 0;
  ::eventfd_read(woken_.get(), &count);  // fails if there was no wake
  if (wakes_.load() == t_seen) return true;
  signal();  // a wake came meanwhile, and a thread may have slept before it
  return false;
}

/// Only fails if it is readable.
void EpollWaiter::signal() noexcept { ::eventfd_write(woken_.get(), 1); }

void EpollWaiter::sleep(std::chrono::nanoseconds at_most) noexcept {
  sleeping_.fetch_add(1);
  if (wakes_.load() == t_seen) {
    if (short_.load()) at_most = std::min(at_most, kShort);
    const timespec time{static_cast<time_t>(at_most.count() / 1'000'000'000),
                        static_cast<long>(at_most.count() % 1'000'000'000)};
    std::array<pollfd, 2> entries{{{epoll_.get(), POLLIN, 0}, {woken_.get(), POLLIN, 0}}};
    ::ppoll(entries.data(), entries.size(), &time, nullptr);
  }
  sleeping_.fetch_sub(1);
}

void EpollWaiter::wake() noexcept {
  wakes_.fetch_add(1);
  signal();
}

}  // namespace tessera::comm::tcp
