#include "plugins/decorators/fault.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::decorators {

struct FaultDecorator::AbortFlag {
  std::mutex mutex;
  std::condition_variable changed;
  bool stopped = false;  ///< guarded by mutex
  std::string reason;    ///< guarded by mutex
};

namespace {

using Clock = std::chrono::steady_clock;

/// The work of a dropped call: never done, because the other ranks never receive the call.
class DroppedWork final : public WorkState {
 public:
  DroppedWork(CompletionPoller& completions, std::shared_ptr<FaultDecorator::AbortFlag> stop,
              Clock::time_point deadline, std::string what)
      : completions_(completions), stop_(std::move(stop)), deadline_(deadline), what_(std::move(what)) {}

  bool done() noexcept override {
    const std::lock_guard lock(stop_->mutex);
    return stop_->stopped || Clock::now() >= deadline_;
  }
  bool wait_until(Clock::time_point until) override {
    std::unique_lock lock(stop_->mutex);
    stop_->changed.wait_until(lock, std::min(until, deadline_), [this] { return stop_->stopped; });
    if (stop_->stopped) throw Aborted(what_ + ": " + stop_->reason);
    if (Clock::now() >= deadline_) throw Timeout(what_ + ": this rank dropped it (an injected fault)");
    return false;
  }
  void wait() override { wait_until(Clock::time_point::max()); }
  void on_done(WorkCallback callback) override { completions_.add(*this, std::move(callback)); }

 private:
  void recycle() noexcept override { delete this; }
  CompletionPoller& completions_;
  const std::shared_ptr<FaultDecorator::AbortFlag> stop_;
  const Clock::time_point deadline_;
  const std::string what_;
};

/// Flips a bit when the operation is first observed done. Holds the sent data if that is what was corrupted.
class CorruptedWork final : public WrappedWork {
 public:
  CorruptedWork(Work inner, CompletionPoller& completions, std::byte* target, std::byte mask,
                std::vector<std::byte> sent)
      : WrappedWork(std::move(inner), completions), target_(target), mask_(mask), sent_(std::move(sent)) {}
  ~CorruptedWork() override { inner() = Work(); }  // waits: the operation may still read `sent_`

  bool done() noexcept override { return WrappedWork::done() && flip(); }
  bool wait_until(Clock::time_point until) override { return WrappedWork::wait_until(until) && flip(); }
  void wait() override {
    WrappedWork::wait();
    flip();
  }

 private:
  bool flip() noexcept {
    if (std::byte* const target = target_.exchange(nullptr); target != nullptr) *target ^= mask_;
    return true;
  }
  std::atomic<std::byte*> target_;
  const std::byte mask_;
  const std::vector<std::byte> sent_;
};

}  // namespace

FaultDecorator::FaultDecorator(std::unique_ptr<Communicator> inner, FaultOptions options,
                               std::shared_ptr<Family> family)
    : Decorator(std::move(inner), std::move(family)), options_(options), stop_(std::make_shared<AbortFlag>()) {}

Work FaultDecorator::do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) {
  const bool mine = number == options_.call && (!options_.rank || *options_.rank == family()->rank);
  if (!mine || calls.empty()) return forward(calls, batch);
  switch (options_.kind) {
    case FaultKind::drop:
      if (const auto& log = logger()) log->write(LogLevel::debug, "fault: drops " + describe(calls, batch, number));
      return Work(
          new DroppedWork(completions(), stop_, Clock::now() + calls.front().timeout, describe(calls, batch, number)));
    case FaultKind::kill:
      std::raise(SIGKILL);
      break;
    case FaultKind::corrupt:
      return corrupt(calls, batch, number);
  }
  return {};
}

Work FaultDecorator::corrupt(std::span<const OpDesc> calls, bool batch, std::uint64_t number) {
  const std::string what = "fault: corrupt at " + describe(calls, batch, number);
  std::vector<OpDesc> changed(calls.begin(), calls.end());
  const auto received = std::find_if(changed.begin(), changed.end(), [](const OpDesc& c) { return c.out.bytes() > 0; });
  const auto given = std::find_if(changed.begin(), changed.end(), [](const OpDesc& c) { return c.in.bytes() > 0; });
  if (received == changed.end() && given == changed.end())
    throw InvalidUsage(what + ": it has no elements on this rank");
  const ConstView touched = received != changed.end() ? ConstView(received->out) : given->in;
  if (touched.device.type != DeviceType::cpu)
    throw Unsupported(what + ": memory of " + name_of(touched.device) + " is not supported");
  // A low bit of the middle element: it changes a result without making it absurd.
  const std::size_t place = touched.count / 2 * size_of(touched.dtype);
  constexpr std::byte kMask{1};
  if (received != changed.end())
    return Work(new CorruptedWork(forward(changed, batch), completions(),
                                  static_cast<std::byte*>(received->out.data) + place, kMask, {}));
  if (Stream* before = after(); before != nullptr && !before->immediate()) before->record().wait();
  std::vector<std::byte> sent(touched.bytes());
  std::memcpy(sent.data(), touched.data, touched.bytes());
  sent[place] ^= kMask;
  given->in.data = sent.data();
  Work work = forward(changed, batch);  // the vector's memory stays where it is when the vector moves
  return Work(new CorruptedWork(std::move(work), completions(), nullptr, kMask, std::move(sent)));
}

std::unique_ptr<Communicator> FaultDecorator::decorate_child(std::unique_ptr<Communicator> child) {
  return std::make_unique<FaultDecorator>(std::move(child), options_, family());
}

void FaultDecorator::do_abort(std::string_view reason) noexcept {
  inner().abort(std::string(reason));
  {
    const std::lock_guard lock(stop_->mutex);
    if (!stop_->stopped) stop_->reason = "rank " + std::to_string(rank()) + " aborted: " + std::string(reason);
    stop_->stopped = true;
  }
  stop_->changed.notify_all();
}

}  // namespace tessera::decorators
