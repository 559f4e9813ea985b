#include "tests/harness/fault.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/decorator.h"

namespace tessera::harness {
namespace {

using namespace comm;
using Clock = std::chrono::steady_clock;

/// Ends waits for dropped calls.
struct AbortFlag {
  std::mutex mutex;
  std::condition_variable changed;
  bool stopped = false;  ///< guarded by mutex
  std::string reason;    ///< guarded by mutex
};

/// The work of a dropped call: never done, because the other ranks never receive the call.
class DroppedWork final : public WorkState {
 public:
  DroppedWork(CompletionPoller& completions, std::shared_ptr<AbortFlag> stop, Clock::time_point deadline,
              std::string what)
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
  const std::shared_ptr<AbortFlag> stop_;
  const Clock::time_point deadline_;
  const std::string what_;
};

constexpr std::byte kMask{1};

/// Flips a bit when the operation is first observed done. Holds the sent data if that is what was corrupted.
class CorruptedWork final : public WorkState {
 public:
  CorruptedWork(Work inner, CompletionPoller& completions, std::byte* target, std::vector<std::byte> sent)
      : sent_(std::move(sent)), inner_(std::move(inner)), completions_(completions), target_(target) {}

  bool done() noexcept override { return inner_.done() && flip(); }
  bool wait_until(Clock::time_point until) override { return inner_.wait_until(until) && flip(); }
  void wait() override {
    inner_.wait();
    flip();
  }
  void on_done(WorkCallback callback) override { completions_.add(*this, std::move(callback)); }

 private:
  void recycle() noexcept override { delete this; }
  bool flip() noexcept {
    if (std::byte* const target = target_.exchange(nullptr); target != nullptr) *target ^= kMask;
    return true;
  }
  const std::vector<std::byte> sent_;  // until the operation, which may still read it, has ended
  Work inner_;
  CompletionPoller& completions_;
  std::atomic<std::byte*> target_;
};

/// State of a world's rank, which all its communicators share.
struct FaultyRank {
  const Fault fault;
  const int rank;
  std::atomic<std::uint64_t> calls{0};
  bool hits(std::uint64_t call) const { return call == fault.call && fault.rank.value_or(rank) == rank; }
};

class FaultyCommunicator final : public Decorator {
 public:
  FaultyCommunicator(std::unique_ptr<Communicator> inner, std::shared_ptr<FaultyRank> rank)
      : Decorator(std::move(inner)), rank_(std::move(rank)) {}

 private:
  Work do_start(const OpDesc& call) override {
    return run({&call, 1}, name_of(call.kind), [&](auto calls) { return Decorator::do_start(calls[0]); });
  }
  Work do_batch(std::span<const OpDesc> parts) override {
    return run(parts, "batch", [&](auto calls) { return Decorator::do_batch(calls); });
  }

  template <class Forward>
  Work run(std::span<const OpDesc> calls, std::string_view name, Forward forward) {
    const std::uint64_t number = ++rank_->calls;
    if (!rank_->hits(number) || calls.empty()) return forward(calls);
    std::string what = std::string(name) + " #" + std::to_string(number);
    if (!calls[0].label.empty()) what += " (" + std::string(calls[0].label) + ")";
    if (rank_->fault.kind == FaultKind::corrupt) return corrupt(calls, what, forward);
    if (rank_->fault.kind == FaultKind::kill) std::raise(SIGKILL);
    return Work(new DroppedWork(completions_, stop_, Clock::now() + calls[0].timeout, what));
  }

  template <class Forward>
  Work corrupt(std::span<const OpDesc> calls, const std::string& what, Forward forward) {
    std::vector<OpDesc> changed(calls.begin(), calls.end());
    const auto received =
        std::find_if(changed.begin(), changed.end(), [](const OpDesc& c) { return c.out.bytes() > 0; });
    const auto given = std::find_if(changed.begin(), changed.end(), [](const OpDesc& c) { return c.in.bytes() > 0; });
    if (received == changed.end() && given == changed.end())
      throw InvalidUsage("fault: corrupt at " + what + ": it has no elements on this rank");
    const ConstView touched = received != changed.end() ? ConstView(received->out) : given->in;
    if (touched.device.type != DeviceType::cpu)
      throw Unsupported("fault: corrupt at " + what + ": memory of " + name_of(touched.device) + " is not supported");
    // A low bit of the middle element: it changes a result without making it absurd.
    const std::size_t place = touched.count / 2 * size_of(touched.dtype);
    if (received != changed.end())
      return Work(new CorruptedWork(forward(std::span<const OpDesc>(changed)), completions_,
                                    static_cast<std::byte*>(received->out.data) + place, {}));
    std::vector<std::byte> sent(touched.bytes());
    std::memcpy(sent.data(), touched.data, touched.bytes());
    sent[place] ^= kMask;
    given->in.data = sent.data();  // which stays where it is when the vector moves
    Work work = forward(std::span<const OpDesc>(changed));
    return Work(new CorruptedWork(std::move(work), completions_, nullptr, std::move(sent)));
  }

  std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> child) override {
    return std::make_unique<FaultyCommunicator>(std::move(child), rank_);
  }
  /// What is to be corrupted is first written.
  void do_after(Stream& stream) override {
    if (rank_->hits(rank_->calls + 1) && !stream.immediate()) return stream.record().wait();
    Decorator::do_after(stream);
  }
  void do_abort(std::string_view reason) noexcept override {
    Decorator::do_abort(reason);
    {
      const std::lock_guard lock(stop_->mutex);
      if (!stop_->stopped) stop_->reason = "rank " + std::to_string(rank()) + " aborted: " + std::string(reason);
      stop_->stopped = true;
    }
    stop_->changed.notify_all();
  }

  const std::shared_ptr<FaultyRank> rank_;
  const std::shared_ptr<AbortFlag> stop_ = std::make_shared<AbortFlag>();
  CompletionPoller completions_;
};

}  // namespace

std::unique_ptr<Communicator> inject(std::unique_ptr<Communicator> world, const Fault& fault) {
  auto rank = std::make_shared<FaultyRank>(fault, world->rank());
  return std::make_unique<FaultyCommunicator>(std::move(world), std::move(rank));
}

}  // namespace tessera::harness
