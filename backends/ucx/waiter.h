// Sleeps until data arrives at a worker or wake() is called.
#pragma once

#include <ucp/api/ucp.h>

#include <atomic>
#include <chrono>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/core/progress.h"

namespace tessera::comm::ucx {

class UcpWaiter final : public ProgressWaiter {
 public:
  /// The worker outlives the waiter, or stop() is called before. `unsent` counts what the worker still has to send: UCX
  /// gives no wake-up when it could continue.
  UcpWaiter(ucp_worker_h worker, const int& unsent);
  bool arm() noexcept override;
  void sleep(std::chrono::nanoseconds at_most) noexcept override;
  void wake() noexcept override;
  void stop() noexcept { worker_ = nullptr; }

 private:
  ucp_worker_h worker_;
  const int& unsent_;
  std::atomic<bool> nap_{false};
  int worker_fd_ = -1;  ///< the worker's
  UniqueFd wake_fd_;
};

}  // namespace tessera::comm::ucx
