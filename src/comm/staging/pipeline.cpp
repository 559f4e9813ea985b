#include "tessera/comm/staging/pipeline.h"

#include "tessera/base/thread.h"
#include "tessera/comm/core/backoff.h"

namespace tessera::comm::staging {

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
