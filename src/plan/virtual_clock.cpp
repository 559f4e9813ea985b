#include "tessera/plan/virtual_clock.h"

#include <array>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::plan {

struct VirtualClock::State {
  Machine machine = Machine::synchronous;
  TaskGraph graph;
  TaskId host = 0;
  std::shared_ptr<TransferModel> transfers;
  std::vector<TaskGraph::Times> times;  // of the first tasks of `graph`, as of the last question

  const TaskGraph::Times& times_of(TaskId task) {
    if (times.size() != graph.tasks().size()) times = graph.solve(transfers.get());
    return times.at(task);
  }
  void host_waits_for(TaskId task) { host = graph.join(host, task); }
};

namespace {

class VirtualEvent final : public base::Event::State {
 public:
  VirtualEvent(std::shared_ptr<VirtualClock::State> clock, TaskId task) : clock_(std::move(clock)), task_(task) {}
  TaskId task() const { return task_; }
  bool done() const override { return clock_->times_of(task_).end_ns <= clock_->times_of(clock_->host).end_ns; }
  void wait() override { clock_->host_waits_for(task_); }
  std::int64_t time_ns() override { return clock_->times_of(task_).end_ns; }

 private:
  const std::shared_ptr<VirtualClock::State> clock_;
  const TaskId task_;
};

class VirtualStream final : public base::Stream {
 public:
  VirtualStream(std::shared_ptr<VirtualClock::State> clock, base::Device device)
      : base::Stream(device, true), clock_(std::move(clock)) {}

  TaskId position() const { return one_order() ? clock_->host : clock_->graph.join(last_, clock_->host); }
  void wait_for(TaskId task) { last() = clock_->graph.join(position(), task); }
  void advance(std::int64_t ns, std::string_view label) {
    const std::array after{last(), clock_->host};
    last() = clock_->graph.add_work(ns, after, label);
  }
  const VirtualClock::State* clock() const { return clock_.get(); }

  base::Event record() override { return base::Event(std::make_shared<VirtualEvent>(clock_, position())); }
  void wait(const base::Event& event) override {
    // Any other event is outside the simulation: the host waits for it, which takes no simulated time.
    if (const auto* mine = dynamic_cast<VirtualEvent*>(event.state().get()))
      wait_for(mine->task());
    else
      event.wait();
  }

 protected:
  void enqueue(std::function<void()> work) override { work(); }

 private:
  bool one_order() const { return clock_->machine == VirtualClock::Machine::synchronous; }
  TaskId& last() { return one_order() ? clock_->host : last_; }
  const std::shared_ptr<VirtualClock::State> clock_;
  TaskId last_ = 0;
};

VirtualStream& own(base::Stream& stream, const VirtualClock::State* clock) {
  auto* mine = dynamic_cast<VirtualStream*>(&stream);
  if (mine == nullptr || mine->clock() != clock)
    throw base::InvalidUsage("virtual clock: the stream belongs to another clock");
  return *mine;
}

}  // namespace

VirtualClock::VirtualClock(Machine machine) : state_(std::make_shared<State>()) { state_->machine = machine; }
VirtualClock::Machine VirtualClock::machine() const { return state_->machine; }
VirtualClock::~VirtualClock() = default;

std::unique_ptr<base::Stream> VirtualClock::make_stream(base::Device device) {
  return std::make_unique<VirtualStream>(state_, device);
}

bool VirtualClock::made(const base::Stream& stream) const {
  const auto* mine = dynamic_cast<const VirtualStream*>(&stream);
  return mine != nullptr && mine->clock() == state_.get();
}

void VirtualClock::advance(base::Stream& stream, std::int64_t ns, std::string_view label) {
  own(stream, state_.get()).advance(ns, label);
}

void VirtualClock::advance_host(std::int64_t ns, std::string_view label) {
  const std::array after{state_->host};
  state_->host = state_->graph.add_work(ns, after, label);
}

TaskId VirtualClock::add_transfer(std::uint32_t transfer, std::span<const TaskId> after, std::string_view label) {
  return state_->graph.add_transfer(transfer, after, label);
}

void VirtualClock::set_transfer_model(std::shared_ptr<TransferModel> transfers) {
  state_->transfers = std::move(transfers);
}

TaskId VirtualClock::position(base::Stream& stream) const { return own(stream, state_.get()).position(); }
TaskId VirtualClock::host_position() const { return state_->host; }
void VirtualClock::wait_for(base::Stream& stream, TaskId task) { own(stream, state_.get()).wait_for(task); }
void VirtualClock::host_waits_for(TaskId task) { state_->host_waits_for(task); }
TaskGraph::Times VirtualClock::times_of(TaskId task) const { return state_->times_of(task); }
const TaskGraph& VirtualClock::graph() const { return state_->graph; }

}  // namespace tessera::plan
