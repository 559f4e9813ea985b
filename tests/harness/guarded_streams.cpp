#include "tests/harness/guarded_streams.h"

#include <chrono>
#include <deque>
#include <optional>
#include <thread>

#include "tessera/base/error.h"

namespace tessera::harness {
namespace {

using namespace base;  // NOLINT: this file implements a class of base

[[noreturn]] void throw_untimed() { throw InvalidUsage("event: it has no time; record it by record_timed()"); }

class Reached final : public Event::State {
 public:
  explicit Reached(bool timed) : timed_(timed) {}
  bool done() const override { return true; }
  void wait() override { ++waits_of_this_thread().events; }
  std::int64_t time_ns() override {
    if (!timed_) throw_untimed();
    wait();
    return time_;
  }

 private:
  const bool timed_;
  const std::int64_t time_ = host_time_ns();
};

class GuardedStream final : public CapturingStream {
 public:
  GuardedStream(Device device, std::shared_ptr<GuardedShared> shared)
      : CapturingStream(device, false), shared_(std::move(shared)) {}
  Event record() override { return record(false); }
  Event record_timed() override { return record(true); }
  void wait(const Event& event) override {
    if (event.state() != nullptr) refuse_in_capture("an event");
    if (!event.done()) event.wait();
  }

 protected:
  void enqueue(std::function<void()> work) override {
    if (recorded(work)) return;
    const std::lock_guard lock(shared_->mutex);
    const OpenArena open(shared_->arena);
    work();
  }

 private:
  Event record(bool timed) {
    refuse_in_capture("an event");
    return Event(std::make_shared<Reached>(timed));
  }
  const std::shared_ptr<GuardedShared> shared_;
};

/// Work that runs on demand. Guarded by the device's lock.
struct LazyWork {
  explicit LazyWork(std::shared_ptr<GuardedShared> device) : shared(std::move(device)) {}
  void run() {
    if (running || tasks.empty()) return;  // running: a task polls its own stream
    running = true;
    const OpenArena open(shared->arena);
    while (!tasks.empty() && tasks.front()()) tasks.pop_front();
    running = false;
  }
  const std::shared_ptr<GuardedShared> shared;
  std::deque<std::function<bool()>> tasks;  ///< false: not ready, retry later
  bool running = false;
};

class LazyPoint final : public Event::State {
 public:
  LazyPoint(std::shared_ptr<LazyWork> work, bool timed) : work_(std::move(work)), timed_(timed) {}
  void reach() { time_ = host_time_ns(); }
  bool done() const override {
    const std::lock_guard lock(work_->shared->mutex);
    if (time_ == 0) work_->run();
    return time_ != 0;
  }
  void wait() override {
    ++waits_of_this_thread().events;
    const std::int64_t until = host_time_ns() + kPatience;
    while (!done()) {
      if (host_time_ns() > until) throw BackendError("the guarded device does not get on");
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
  std::int64_t time_ns() override {
    if (!timed_) throw_untimed();
    wait();
    return time_;
  }

 private:
  static constexpr std::int64_t kPatience = 60'000'000'000;
  const std::shared_ptr<LazyWork> work_;
  const bool timed_;
  std::int64_t time_ = 0;
};

class LazyGuardedStream final : public CapturingStream {
 public:
  LazyGuardedStream(Device device, const std::shared_ptr<GuardedShared>& shared, bool deaf)
      : CapturingStream(device, false), work_(std::make_shared<LazyWork>(shared)), deaf_(deaf) {}
  ~LazyGuardedStream() override {
    const std::lock_guard lock(work_->shared->mutex);
    work_->run();
  }
  Event record() override { return record(false); }
  Event record_timed() override { return record(true); }
  void delay(std::chrono::milliseconds time) {
    push([time, until = std::optional<std::chrono::steady_clock::time_point>()]() mutable {
      const auto now = std::chrono::steady_clock::now();
      if (!until) until = now + time;
      return now >= *until;
    });
  }
  void wait(const Event& event) override {
    if (event.state() != nullptr) refuse_in_capture("an event");
    if (!deaf_) push([event] { return event.done(); });
  }

 protected:
  void enqueue(std::function<void()> work) override {
    if (recorded(work)) return;
    push([work = std::move(work)] {
      work();
      return true;
    });
  }

 private:
  Event record(bool timed) {
    refuse_in_capture("an event");
    auto point = std::make_shared<LazyPoint>(work_, timed);
    push([weak = std::weak_ptr(point)] {
      if (const auto reached = weak.lock()) reached->reach();
      return true;
    });
    return Event(point);
  }
  void push(std::function<bool()> task) {
    const std::lock_guard lock(work_->shared->mutex);
    work_->tasks.push_back(std::move(task));
  }
  const std::shared_ptr<LazyWork> work_;
  const bool deaf_;
};

}  // namespace

void CapturingStream::begin_capture() {
  if (recording_) throw InvalidUsage("the stream is recording already");
  recording_.emplace();
  broken_ = false;
}

CapturingStream::Works CapturingStream::end_capture() {
  if (!recording_) throw InvalidUsage("the stream is not recording");
  Works works = std::move(*recording_);
  recording_.reset();
  if (broken_) throw BackendError("what was recorded can't be a graph");
  return works;
}

bool CapturingStream::recorded(std::function<void()>& work) {
  if (recording_) recording_->push_back(std::move(work));
  return recording_.has_value();
}

void CapturingStream::refuse_in_capture(const char* what) {
  if (!recording_) return;
  broken_ = true;
  throw BackendError(std::string(what) + " can't be recorded");
}

HostWaits& waits_of_this_thread() {
  thread_local HostWaits waits;
  return waits;
}

HostWaits host_waits() { return waits_of_this_thread(); }

std::unique_ptr<Stream> make_guarded_stream(Device device, std::shared_ptr<GuardedShared> shared) {
  return std::make_unique<GuardedStream>(device, std::move(shared));
}

std::unique_ptr<Stream> make_lazy_guarded_stream(Device device, const std::shared_ptr<GuardedShared>& shared,
                                                 bool deaf) {
  return std::make_unique<LazyGuardedStream>(device, shared, deaf);
}

void delay_guarded_stream(Stream& stream, std::chrono::milliseconds time) {
  dynamic_cast<LazyGuardedStream&>(stream).delay(time);
}

}  // namespace tessera::harness
