#include "tessera/base/device_runtime.h"

#include <atomic>
#include <charconv>
#include <condition_variable>
#include <mutex>

#include "tessera/base/error.h"

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
    if (done()) return;
    time_.store(host_time_ns(), std::memory_order_release);
    reached_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  std::atomic<std::int64_t> time_{0};
};

/// The event of devices without a native one: waiting for it blocks the host.
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
Graph::~Graph() = default;
DeviceRuntime::~DeviceRuntime() = default;

std::unique_ptr<Stream> DeviceRuntime::borrow_stream(void* /*native*/) {
  throw Unsupported("device " + name_of(device_) + ": streams of other libraries can't be used");
}

std::unique_ptr<HostEvent> DeviceRuntime::make_signal() { return std::make_unique<CpuHostEvent>(); }

void DeviceRuntime::begin_capture(Stream&) {
  throw Unsupported("graph capture: device " + name_of(device()) + " does not support it");
}

std::unique_ptr<Graph> DeviceRuntime::end_capture(Stream&) { throw InvalidUsage("graph capture: end without begin"); }

IpcMemoryHandle DeviceRuntime::get_ipc_handle(void*, std::size_t) {
  throw Unsupported("IPC: memory of " + name_of(device()) + " can't be shared between processes");
}

void* DeviceRuntime::open_ipc_handle(const IpcMemoryHandle&) {
  throw Unsupported("IPC: memory of " + name_of(device()) + " can't be shared between processes");
}

void DeviceRuntime::close_ipc_handle(void*) noexcept {}

std::string name_of(Device device) {
  switch (device.type) {
    case DeviceType::cpu:
      return "cpu";
    case DeviceType::meta:
      return "meta";
    case DeviceType::cuda:
      return "cuda:" + std::to_string(device.index);
  }
  return "?";
}

Device parse_device(std::string_view name) {
  if (name == "cpu") return {DeviceType::cpu, 0};
  if (name == "meta") return {DeviceType::meta, 0};
  if (name == "cuda") return {DeviceType::cuda, 0};
  if (name.starts_with("cuda:")) {
    int index = -1;
    const std::string_view digits = name.substr(5);
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    if (error == std::errc{} && end == digits.data() + digits.size() && index >= 0) return {DeviceType::cuda, index};
  }
  throw InvalidUsage("unknown device '" + std::string(name) + "'; known: cpu, meta, cuda, cuda:N");
}

}  // namespace tessera::base
