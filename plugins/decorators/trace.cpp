#include "plugins/decorators/trace.h"

#include <mutex>
#include <string>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::decorators {
namespace {

class TracedWork final : public WrappedWork {
 public:
  TracedWork(Work inner, CompletionPoller& completions, OperationEvent event, std::shared_ptr<const TraceSink> sink)
      : WrappedWork(std::move(inner), completions), event_(std::move(event)), sink_(std::move(sink)) {}

  bool done() noexcept override {
    if (!inner().done()) return false;
    watched([this] { inner().wait(); }, false);
    return true;
  }
  bool wait_until(std::chrono::steady_clock::time_point until) override {
    bool finished = false;
    watched([&] { finished = inner().wait_until(until); }, true, &finished);
    return finished;
  }
  void wait() override {
    watched([this] { inner().wait(); }, true);
  }
  void wait_on(Stream& stream) override {
    if (stream.device().type == DeviceType::cpu) return WorkState::wait_on(stream);
    inner().wait_on(stream);
    end({}, true);
  }

 private:
  /// Runs `wait`, and records its end or error.
  template <class Wait>
  void watched(Wait wait, bool rethrow, const bool* finished = nullptr) {
    try {
      wait();
    } catch (const Error& error) {
      end(std::string(error.kind()) + ": " + error.what());
      if (rethrow) throw;
      return;
    }
    if (finished == nullptr || *finished) end();
  }
  void end(std::string error = {}, bool handed_over = false) {
    const std::lock_guard lock(mutex_);
    if (sink_ == nullptr) return;
    event_.error = std::move(error);
    event_.handed_over = handed_over;
    event_.end_ns = host_time_ns();
    (*sink_)(event_);
    sink_ = nullptr;
  }

  std::mutex mutex_;  // guards what follows
  OperationEvent event_;
  std::shared_ptr<const TraceSink> sink_;  // null: the event is recorded
};

}  // namespace

Work TraceDecorator::do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) {
  OperationEvent event{.operation = std::string(name_of(calls, batch)),
                       .rank = family()->rank,
                       .communicator = index(),
                       .number = number,
                       .bytes = bytes_of(calls),
                       .start_ns = host_time_ns()};
  if (!calls.empty()) event.label = calls.front().label;
  try {
    Work work = forward(calls, batch);
    return Work(new TracedWork(std::move(work), completions(), std::move(event), sink_));
  } catch (const Error& error) {
    event.end_ns = host_time_ns();
    event.error = std::string(error.kind()) + ": " + error.what();
    (*sink_)(event);
    throw;
  }
}

std::unique_ptr<Communicator> TraceDecorator::decorate_child(std::unique_ptr<Communicator> child) {
  return std::make_unique<TraceDecorator>(std::move(child), *sink_, family());
}

}  // namespace tessera::decorators
