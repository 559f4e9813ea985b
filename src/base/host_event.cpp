// The host event of devices without a native one: waiting for it blocks the host.
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "tessera/base/device_runtime.h"

namespace tessera::base {
namespace {

class HostEventState final : public Event::State {
 public:
  bool done() const override { return time_.load(std::memory_order_acquire) != 0; }
  void wait() override {
    std::unique_lock lock(mutex_);
    reached_.wait(lock, [this] { return done(); });
  }
  std::int64_t time_ns() override {
    wait();
    return time_.load();
  }
  void reach() noexcept {
    const std::lock_guard lock(mutex_);
    time_.store(host_time_ns(), std::memory_order_release);
    reached_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  std::atomic<std::int64_t> time_{0};
};

class CpuHostEvent final : public HostEvent {
 public:
  ~CpuHostEvent() override {
    if (point_ != nullptr) point_->reach();
  }
  Event arm() override {
    point_ = std::make_shared<HostEventState>();
    return Event(point_);
  }
  void set() noexcept override { point_->reach(); }

 private:
  std::shared_ptr<HostEventState> point_;
};

}  // namespace

HostEvent::~HostEvent() = default;

std::unique_ptr<HostEvent> DeviceRuntime::make_signal() { return std::make_unique<CpuHostEvent>(); }

}  // namespace tessera::base
