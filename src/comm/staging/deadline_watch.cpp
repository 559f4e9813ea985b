#include "tessera/comm/staging/deadline_watch.h"

#include <algorithm>

#include "tessera/base/thread.h"
#include "tessera/comm/staging/staged_operation.h"

namespace tessera::comm::staging {

DeadlineWatch::DeadlineWatch() : wake_(Clock::time_point::max()), thread_(base::start_thread([this] { run(); })) {}

DeadlineWatch::~DeadlineWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void DeadlineWatch::add(StagedOperation& operation) {
  const std::lock_guard lock(mutex_);
  operations_.push_back(&operation);
  if (operation.deadline() + kGrace < wake_) changed_.notify_one();
}

void DeadlineWatch::remove(StagedOperation& operation) noexcept {
  const std::lock_guard lock(mutex_);
  std::erase(operations_, &operation);
}

void DeadlineWatch::run() noexcept {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const Clock::time_point now = Clock::now();
    wake_ = Clock::time_point::max();
    std::erase_if(operations_, [&](StagedOperation* operation) {
      const Clock::time_point last = operation->deadline() + kGrace;
      const bool over = last <= now;
      if (over) operation->expire();
      if (!over) wake_ = std::min(wake_, last);
      return over;
    });
    const auto earlier = [this] {
      return stop_ || std::ranges::any_of(operations_,
                                          [this](auto* operation) { return operation->deadline() + kGrace < wake_; });
    };
    if (wake_ == Clock::time_point::max())
      changed_.wait(lock, earlier);
    else
      changed_.wait_until(lock, wake_, earlier);
  }
}

}  // namespace tessera::comm::staging
