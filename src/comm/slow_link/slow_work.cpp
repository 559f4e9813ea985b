#include "tessera/comm/slow_link/slow_work.h"

#include <sys/prctl.h>

#include <algorithm>
#include <string>
#include <thread>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a failure may go unnoticed while a transfer is slept for.
constexpr std::chrono::milliseconds kSlice{50};

/// The kernel wakes this thread as soon as it can, instead of 50 us later, which is the default.
class PreciseTimer {
 public:
  PreciseTimer() { ::prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL); }
  ~PreciseTimer() { ::prctl(PR_SET_TIMERSLACK, before_, 0UL, 0UL, 0UL); }
  PreciseTimer(const PreciseTimer&) = delete;
  PreciseTimer& operator=(const PreciseTimer&) = delete;

 private:
  const unsigned long before_ = static_cast<unsigned long>(::prctl(PR_GET_TIMERSLACK, 0UL, 0UL, 0UL, 0UL));
};

std::int64_t nanoseconds_of(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

double microseconds(std::chrono::nanoseconds time) { return static_cast<double>(time.count()) * 1e-3; }

}  // namespace

SlowWork::SlowWork(Work inner, Communicator& inner_communicator, std::shared_ptr<SlowRank> rank,
                   std::shared_ptr<Transfer> transfer, CallTimes::TimePoint deadline, CompletionPoller& completions)
    : inner_(std::move(inner)),
      communicator_(inner_communicator),
      rank_(std::move(rank)),
      transfer_(std::move(transfer)),
      deadline_(deadline),
      completions_(completions) {}

/// The inner work is done, so all ranks have called that this one waited for.
Clock::time_point SlowWork::through() const { return rank_->ports.done_at(*transfer_).value_or(transfer_->called); }

/// An empty batch sends nothing, but throws the communicator's failure, also that of a peer.
void SlowWork::throw_if_failed() {
  if (Clock::now() >= deadline_) {
    const std::string text =
        "an operation was not through the slow link within its timeout of " +
        std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(deadline_ - transfer_->called).count()) +
        " ms; use a faster link or a longer timeout";
    communicator_.abort(text);
    throw Timeout(text);
  }
  communicator_.batch({});
}

bool SlowWork::done() noexcept {
  if (!inner_.done()) return false;
  try {
    inner_.wait();
    if (through() <= Clock::now()) return true;
    throw_if_failed();
    return false;
  } catch (const std::exception&) {
    return true;  // which waiting throws
  }
}

/// True if the transfer is through. The time is absolute, so that waking up late does not add up.
bool SlowWork::sleep_until(Clock::time_point until) {
  const Clock::time_point end = through();
  if (end <= Clock::now()) return true;
  const PreciseTimer timer;
  while (true) {
    throw_if_failed();
    std::this_thread::sleep_until(std::min({end, until, deadline_, Clock::now() + kSlice}));
    const Clock::time_point now = Clock::now();
    if (now >= end) {
      const std::lock_guard lock(rank_->mutex);
      rank_->late.add(microseconds(now - end));
      rank_->took.add(microseconds(end - transfer_->begun));
      return true;
    }
    if (now >= until) return false;
  }
}

bool SlowWork::wait_until(Clock::time_point until) { return inner_.wait_until(until) && sleep_until(until); }

void SlowWork::wait() {
  const Clock::time_point begin = Clock::now();
  inner_.wait();
  sleep_until(Clock::time_point::max());
  if (rank_->records && !recorded_.exchange(true)) record_wait(begin);  // the destructor waits again
}

void SlowWork::record_wait(Clock::time_point begin) {
  const LinkWait wait{.begin_ns = nanoseconds_of(begin),
                      .all_called_ns = nanoseconds_of(transfer_->begun),
                      .through_ns = nanoseconds_of(through()),
                      .end_ns = nanoseconds_of(Clock::now())};
  const std::lock_guard lock(rank_->mutex);
  rank_->record.waits.push_back(wait);
}

void SlowWork::wait_on(Stream& stream) {
  if (stream.device().type != DeviceType::cpu)
    throw Unsupported("slow links: streams of " + name_of(stream.device()) + " are not supported; use the cpu");
  WorkState::wait_on(stream);
}

}  // namespace tessera::comm
