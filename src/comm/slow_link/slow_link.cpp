#include "tessera/comm/slow_link/slow_link.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/completion_poller.h"
#include "tessera/comm/core/backoff.h"
#include "tessera/comm/core/decorator.h"
#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/slow_link/ports.h"

namespace tessera::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// How long a failure may go unnoticed while a transfer is slept for.
constexpr std::chrono::milliseconds kSlice{50};

std::int64_t nanoseconds_of(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

double microseconds(std::chrono::nanoseconds time) { return static_cast<double>(time.count()) * 1e-3; }

/// What the communicators of a rank share.
struct SlowRank {
  Ports ports;
  std::mutex mutex;        // guards what follows
  LatestTimes late, took;  // of the transfers that the rank slept for
  bool records = false;    // constant; and what take_record() returns
  LinkRecord record;
};

/// Done when the inner work is and its transfer is through.
class SlowWork final : public WorkState {
 public:
  /// `inner_communicator`: that of `inner`. The operation fails at `deadline`.
  SlowWork(Work inner, Communicator& inner_communicator, std::shared_ptr<SlowRank> rank,
           std::shared_ptr<Transfer> transfer, Clock::time_point deadline, CompletionPoller& completions)
      : inner_(std::move(inner)),
        communicator_(inner_communicator),
        rank_(std::move(rank)),
        transfer_(std::move(transfer)),
        deadline_(deadline),
        completions_(completions) {}

  bool done() noexcept override {
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

  bool wait_until(Clock::time_point until) override { return inner_.wait_until(until) && sleep_until(until); }

  void wait() override {
    const Clock::time_point begin = Clock::now();
    inner_.wait();
    sleep_until(Clock::time_point::max());
    if (rank_->records && !recorded_.exchange(true)) record_wait(begin);  // the destructor waits again
  }

  void wait_on(Stream& stream) override {
    if (stream.device().type != DeviceType::cpu)
      throw Unsupported("slow links: streams of " + name_of(stream.device()) + " are not supported; use the cpu");
    WorkState::wait_on(stream);
  }

  void on_done(WorkCallback callback) override { completions_.add(*this, std::move(callback)); }

 private:
  ~SlowWork() override { rank_->ports.remove(*transfer_); }
  void recycle() noexcept override { delete this; }

  /// The inner work is done, so all ranks have called that this one waited for.
  Clock::time_point through() const { return rank_->ports.done_at(*transfer_).value_or(transfer_->called); }

  /// An empty batch sends nothing, but throws the communicator's failure, also that of a peer.
  void throw_if_failed() {
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

  /// True if the transfer is through. The time is absolute, so that waking up late does not add up.
  bool sleep_until(Clock::time_point until) {
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

  void record_wait(Clock::time_point begin) {
    const LinkWait wait{.begin_ns = nanoseconds_of(begin),
                        .all_called_ns = nanoseconds_of(transfer_->begun),
                        .through_ns = nanoseconds_of(through()),
                        .end_ns = nanoseconds_of(Clock::now())};
    const std::lock_guard lock(rank_->mutex);
    rank_->record.waits.push_back(wait);
  }

  Work inner_;
  Communicator& communicator_;
  const std::shared_ptr<SlowRank> rank_;
  const std::shared_ptr<Transfer> transfer_;
  const Clock::time_point deadline_;
  CompletionPoller& completions_;
  std::atomic<bool> recorded_{false};
};

class SlowCommunicator final : public Decorator {
 public:
  SlowCommunicator(std::unique_ptr<Communicator> inner, const SlowLinks& links, int world_rank, int world_size,
                   std::shared_ptr<SlowRank> state)
      : Decorator(std::move(inner)),
        links_(links),
        world_rank_(world_rank),
        world_size_(world_size),
        state_(std::move(state)),
        members_(static_cast<std::size_t>(size())),
        times_(this->inner()) {
    this->inner()
        .all_gather(view_of(&world_rank_, 1), view_of(members_.data(), members_.size()), {.label = "slow link"})
        .wait();
    forget_traffic();
    own_capabilities().any_source = false;  // the port that a message takes is known only when it has come
  }

  Lateness lateness() const {
    const std::lock_guard lock(state_->mutex);
    const double took = state_->took.median();
    const double late = state_->late.median();
    return {late, took > 0 ? 100 * late / took : 0, times_.shared()};
  }

  LinkRecord take_record() const {
    const std::lock_guard lock(state_->mutex);
    return std::exchange(state_->record, {});
  }

 private:
  Work do_start(const OpDesc& call) override {
    const auto transfer = begin({&call, 1});
    return pass(Decorator::do_start(call), transfer, call.timeout);
  }
  Work do_batch(std::span<const OpDesc> parts) override {
    if (parts.empty()) return Decorator::do_batch(parts);
    const auto transfer = begin(parts);
    return pass(Decorator::do_batch(parts), transfer, parts.front().timeout);
  }

  std::shared_ptr<Transfer> begin(std::span<const OpDesc> calls) {
    if (size() == 1) return nullptr;
    auto transfer = std::make_shared<Transfer>();
    transfer->use = port_use({links_, world_size_, members_, rank()}, calls);
    transfer->called = Clock::now();
    if (!is_message(calls.front().kind)) {
      transfer->times = &times_;
      transfer->number = calls_++;
      times_.record(transfer->number, transfer->called);
    }
    if (state_->records) record(*transfer);
    return transfer;
  }

  void record(const Transfer& transfer) {
    LinkCall call{.called_ns = nanoseconds_of(transfer.called), .latency_ns = transfer.use.latency.count()};
    for (const std::chrono::nanoseconds port : transfer.use.occupied) call.occupied_ns += port.count();
    const std::lock_guard lock(state_->mutex);
    state_->record.calls.push_back(call);
  }

  Work pass(Work work, const std::shared_ptr<Transfer>& transfer, std::chrono::milliseconds timeout) {
    if (transfer == nullptr) return work;
    state_->ports.add(transfer);
    return Work(new SlowWork(std::move(work), inner(), state_, transfer, transfer->called + timeout, completions_));
  }

  std::unique_ptr<Communicator> decorate(std::unique_ptr<Communicator> child) override {
    return std::make_unique<SlowCommunicator>(std::move(child), links_, world_rank_, world_size_, state_);
  }

  const SlowLinks links_;
  const std::int32_t world_rank_;
  const int world_size_;
  const std::shared_ptr<SlowRank> state_;
  std::vector<std::int32_t> members_;  // as ranks of the world
  CallTimes times_;
  std::uint64_t calls_ = 0;  // of collectives
  CompletionPoller completions_;
};

}  // namespace

std::unique_ptr<Communicator> slow_links(std::unique_ptr<Communicator> world, const SlowLinks& links) {
  const int rank = world->rank();
  const int size = world->size();
  if (links.hosts < 1 || size % links.hosts != 0)
    throw InvalidUsage("slow links: " + std::to_string(size) + " ranks don't divide into " +
                       std::to_string(links.hosts) + " hosts of equal size; use a divisor of the number of ranks");
  if (!(links.link.bytes_per_second > 0) || (links.hosts > 1 && !(links.intra.bytes_per_second > 0)))
    throw InvalidUsage("slow links: a link needs a rate above 0");
  auto state = std::make_shared<SlowRank>();
  state->records = links.record;
  return std::make_unique<SlowCommunicator>(std::move(world), links, rank, size, std::move(state));
}

namespace {

const SlowCommunicator& slow_communicator(const Communicator& communicator, const char* function) {
  const auto* slow = dynamic_cast<const SlowCommunicator*>(&communicator);
  if (slow == nullptr) throw InvalidUsage(std::string(function) + ": the communicator has no slow links");
  return *slow;
}

}  // namespace

Lateness lateness_of(const Communicator& communicator) {
  return slow_communicator(communicator, "lateness_of").lateness();
}

LinkRecord take_record(const Communicator& communicator) {
  return slow_communicator(communicator, "take_record").take_record();
}

}  // namespace tessera::comm
