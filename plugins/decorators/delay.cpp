#include "plugins/decorators/delay.h"

#include <algorithm>
#include <thread>

#include "tessera/base/error.h"

namespace tessera::decorators {
namespace {

using Clock = std::chrono::steady_clock;

/// SplitMix64's finalizer: neighboring numbers yield unrelated bits.
std::uint64_t scramble(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class DelayedWork final : public WrappedWork {
 public:
  DelayedWork(Work inner, CompletionPoller& completions, Clock::time_point ready)
      : WrappedWork(std::move(inner), completions), ready_(ready) {}

  bool done() noexcept override { return inner().done() && Clock::now() >= ready_; }
  bool wait_until(Clock::time_point until) override {
    if (!inner().wait_until(until)) return false;  // an error is not delayed
    std::this_thread::sleep_until(std::min(until, ready_));
    return Clock::now() >= ready_;
  }
  void wait() override {
    inner().wait();
    std::this_thread::sleep_until(ready_);
  }
  void wait_on(Stream& stream) override {
    if (stream.device().type != DeviceType::cpu)
      throw Unsupported("delay: streams of " + name_of(stream.device()) + " are not supported");
    WorkState::wait_on(stream);
  }

 private:
  const Clock::time_point ready_;
};

}  // namespace

std::chrono::nanoseconds delay_of(const DelayOptions& options, int rank, std::uint64_t number, std::uint64_t bytes) {
  double factor = 1;
  if (options.seed) {
    const std::uint64_t bits = scramble(scramble(*options.seed) ^ scramble(number) ^ static_cast<std::uint64_t>(rank));
    factor = 0.5 + static_cast<double>(bits >> 11) * 0x1p-53;
  }
  double seconds = std::chrono::duration<double>(options.latency).count() * factor;
  if (options.bytes_per_second > 0) seconds += static_cast<double>(bytes) / options.bytes_per_second;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

Work DelayDecorator::do_call(std::span<const OpDesc> calls, bool batch, std::uint64_t number) {
  if (calls.empty() || (options_.only && calls.front().kind != *options_.only)) return forward(calls, batch);
  const Clock::time_point called = Clock::now();
  const std::chrono::nanoseconds delay = delay_of(options_, family()->rank, number, bytes_of(calls));
  const std::chrono::nanoseconds limit = calls.front().timeout;
  return Work(new DelayedWork(forward(calls, batch), completions(), called + std::min(delay, limit)));
}

std::unique_ptr<Communicator> DelayDecorator::decorate_child(std::unique_ptr<Communicator> child) {
  return std::make_unique<DelayDecorator>(std::move(child), options_, family());
}

}  // namespace tessera::decorators
