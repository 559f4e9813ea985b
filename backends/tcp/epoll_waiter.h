// Puts threads of a rank to sleep until a socket is ready.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"

namespace tessera::comm::tcp {

class EpollWaiter final : public ProgressWaiter {
 public:
  EpollWaiter();  ///< throws SystemError
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;

  /// Sleep at most a millisecond at a time, since more is awaited than the events of the set.
  void keep_short(bool on) noexcept { short_.store(on); }
  /// The set of sockets whose events end a sleep.
  int epoll() const noexcept { return epoll_.get(); }

 private:
  void signal() noexcept;

  const UniqueFd epoll_;
  const UniqueFd woken_;  // an eventfd: readable from wake() until no thread sleeps any more
  std::atomic<std::uint32_t> wakes_{0};
  std::atomic<std::uint32_t> sleeping_{0};
  std::atomic<bool> short_{false};
};

}  // namespace tessera::comm::tcp
