#include "tessera/base/virtual_clock.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::base {

struct VirtualClock::State {
  Machine machine = Machine::synchronous;
  std::int64_t host = 0;
};

namespace {

class VirtualEvent final : public Event::State {
 public:
  VirtualEvent(std::shared_ptr<VirtualClock::State> clock, std::int64_t time) : clock_(std::move(clock)), time_(time) {}
  bool done() const override { return time_ <= clock_->host; }
  void wait() override { clock_->host = std::max(clock_->host, time_); }
  std::int64_t time_ns() override { return time_; }

 private:
  const std::shared_ptr<VirtualClock::State> clock_;
  const std::int64_t time_;
};

class VirtualStream final : public Stream {
 public:
  VirtualStream(std::shared_ptr<VirtualClock::State> clock, Device device)
      : Stream(device, true), clock_(std::move(clock)) {}

  std::int64_t now() const { return one_order() ? clock_->host : std::max(own_, clock_->host); }
  void set(std::int64_t time) { (one_order() ? clock_->host : own_) = time; }
  const VirtualClock::State* clock() const { return clock_.get(); }

  Event record() override { return Event(std::make_shared<VirtualEvent>(clock_, now())); }
  void wait(const Event& event) override {
    // Any other event is outside the simulation: the host waits for it, which takes no simulated time.
    if (dynamic_cast<VirtualEvent*>(event.state().get()) != nullptr)
      set(std::max(now(), event.time_ns()));
    else
      event.wait();
  }

 protected:
  void enqueue(std::function<void()> work) override { work(); }

 private:
  bool one_order() const { return clock_->machine == VirtualClock::Machine::synchronous; }
  const std::shared_ptr<VirtualClock::State> clock_;
  std::int64_t own_ = 0;
};

VirtualStream& own(Stream& stream, const VirtualClock::State* clock) {
  auto* mine = dynamic_cast<VirtualStream*>(&stream);
  if (mine == nullptr || mine->clock() != clock)
    throw InvalidUsage("virtual clock: the stream belongs to another clock");
  return *mine;
}

}  // namespace

VirtualClock::VirtualClock(Machine machine) : state_(std::make_shared<State>(State{machine, 0})) {}
VirtualClock::~VirtualClock() = default;

std::unique_ptr<Stream> VirtualClock::make_stream(Device device) {
  return std::make_unique<VirtualStream>(state_, device);
}

bool VirtualClock::made(const Stream& stream) const {
  const auto* mine = dynamic_cast<const VirtualStream*>(&stream);
  return mine != nullptr && mine->clock() == state_.get();
}

void VirtualClock::advance(Stream& stream, std::int64_t ns) {
  VirtualStream& mine = own(stream, state_.get());
  mine.set(mine.now() + ns);
}

std::int64_t VirtualClock::time_of(Stream& stream) const { return own(stream, state_.get()).now(); }

void VirtualClock::wait_until(Stream& stream, std::int64_t ns) {
  VirtualStream& mine = own(stream, state_.get());
  mine.set(std::max(mine.now(), ns));
}

std::int64_t VirtualClock::host_time() const { return state_->host; }

void VirtualClock::host_waits_until(std::int64_t ns) { state_->host = std::max(state_->host, ns); }

}  // namespace tessera::base
