#include "tessera/base/stream.h"

#include <chrono>
#include <deque>

#include "tessera/base/device_stream.h"

namespace tessera::base {

Event::State::~State() = default;
Stream::~Stream() = default;
DeviceStream::~DeviceStream() = default;

std::int64_t host_time_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace {

class CompletedEvent final : public Event::State {
 public:
  bool done() const override { return true; }
  void wait() override {}
  std::int64_t time_ns() override { return time_; }

 private:
  const std::int64_t time_ = host_time_ns();
};

class ImmediateStream final : public Stream {
 public:
  ImmediateStream() : Stream(Device{}, true) {}
  Event record() override { return Event(std::make_shared<CompletedEvent>()); }
  void wait(const Event& event) override { event.wait(); }

 protected:
  void enqueue(std::function<void()> work) override { work(); }
};

/// The queue of a lazy stream. Events share it, so that they may outlive the stream.
class LazyQueue {
 public:
  std::uint64_t push(std::function<void()> work) {
    queue_.push_back(std::move(work));
    return ++pushed_;
  }
  bool reached(std::uint64_t position) const { return run_ >= position; }

  void run_until(std::uint64_t position) {
    const FpEnvironment environment;
    while (run_ < position && !queue_.empty()) {
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      ++run_;
      work();
    }
  }

 private:
  std::deque<std::function<void()>> queue_;
  std::uint64_t pushed_ = 0;
  std::uint64_t run_ = 0;
};

class LazyEvent final : public Event::State {
 public:
  explicit LazyEvent(std::shared_ptr<LazyQueue> queue) : queue_(std::move(queue)) {}
  void at(std::uint64_t position) { position_ = position; }
  void reach() { time_ = host_time_ns(); }
  bool done() const override { return queue_->reached(position_); }
  void wait() override { queue_->run_until(position_); }
  std::int64_t time_ns() override {
    wait();
    return time_;
  }
  const LazyQueue* queue() const { return queue_.get(); }

 private:
  const std::shared_ptr<LazyQueue> queue_;
  std::uint64_t position_ = 0;
  std::int64_t time_ = 0;
};

class LazyStream final : public Stream {
 public:
  LazyStream() : Stream(Device{}, false) {}
  Event record() override {
    auto event = std::make_shared<LazyEvent>(queue_);
    // A weak handle in the queue: with a strong one, queue and event would own each other.
    event->at(queue_->push([weak = std::weak_ptr<LazyEvent>(event)] {
      if (const auto reached = weak.lock()) reached->reach();
    }));
    return Event(event);
  }
  void wait(const Event& event) override {
    // An event of this queue is passed anyway, and a queue that owned its own event would never be freed.
    const auto* own = dynamic_cast<const LazyEvent*>(event.state().get());
    if (own != nullptr && own->queue() == queue_.get()) return;
    enqueue([event] { event.wait(); });
  }

 protected:
  void enqueue(std::function<void()> work) override { queue_->push(std::move(work)); }

 private:
  const std::shared_ptr<LazyQueue> queue_ = std::make_shared<LazyQueue>();
};

}  // namespace

std::unique_ptr<Stream> make_immediate_stream() { return std::make_unique<ImmediateStream>(); }
std::unique_ptr<Stream> make_lazy_stream() { return std::make_unique<LazyStream>(); }

}  // namespace tessera::base
