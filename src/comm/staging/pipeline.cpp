#include "tessera/comm/staging/pipeline.h"

#include <algorithm>

#include "tessera/base/thread.h"
#include "tessera/comm/core/backoff.h"

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

using namespace std::chrono_literals;

StagingPipeline::StagingPipeline(std::shared_ptr<DeviceRuntime> device, StagingOptions options)
    : device_(std::move(device)),
      options_(std::move(options)),
      down_(device_->make_copy_stream()),
      up_(device_->make_copy_stream()),
      thread_(base::start_thread([this] { run(); })) {}

StagingPipeline::~StagingPipeline() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  work_.notify_one();
  thread_.join();
}

void StagingPipeline::add(StagedOperation& operation) {
  operation.retain();
  active_.push_back(&operation);
  watch_.add(operation);
  operation.advance();
  work_.notify_one();
}

bool StagingPipeline::try_advance() noexcept {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  return lock.owns_lock() && advance_locked();
}

bool StagingPipeline::advance_locked() noexcept {
  bool moved = false;
  std::erase_if(active_, [&](StagedOperation* operation) {
    if (!operation->finished()) moved |= operation->advance();
    const bool finished = operation->finished();
    if (finished) operation->release();
    return finished;
  });
  return moved;
}

bool StagingPipeline::poll_until(const std::function<bool()>& condition, Clock::time_point until) {
  struct Waiting {
    std::atomic<int>& count;
    explicit Waiting(std::atomic<int>& waiters) : count(waiters) { count.fetch_add(1); }
    ~Waiting() { count.fetch_sub(1); }
  } const waiting(waiters_);
  Backoff pause;
  while (!condition()) {
    if (try_advance()) {
      pause.reset();
      continue;
    }
    const Clock::time_point now = Clock::now();
    if (now >= until) return condition();
    pause(until - now);
  }
  return true;
}

void StagingPipeline::run() noexcept {
  std::unique_lock lock(mutex_);
  Backoff pause;
  while (!stop_) {
    if (active_.empty()) {
      work_.wait(lock, [this] { return stop_ || !active_.empty(); });
      pause.reset();
      continue;
    }
    const bool moved = waiters_.load() == 0 && advance_locked();
    lock.unlock();
    if (moved) {
      pause.reset();
    } else {
      pause(500us);
    }
    lock.lock();
  }
}

}  // namespace tessera::comm::staging
