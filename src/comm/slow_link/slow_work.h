// An operation over slow links.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "tessera/comm/communicator.h"
#include "tessera/comm/completion_poller.h"
#include "tessera/comm/slow_link/latest_times.h"
#include "tessera/comm/slow_link/ports.h"
#include "tessera/comm/slow_link/slow_link.h"

namespace tessera::comm {

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
           std::shared_ptr<Transfer> transfer, CallTimes::TimePoint deadline, CompletionPoller& completions);

  bool done() noexcept override;
  bool wait_until(CallTimes::TimePoint until) override;
  void wait() override;
  void wait_on(Stream& stream) override;
  void on_done(WorkCallback callback) override { completions_.add(*this, std::move(callback)); }

 private:
  ~SlowWork() override { rank_->ports.remove(*transfer_); }
  void recycle() noexcept override { delete this; }
  CallTimes::TimePoint through() const;
  bool sleep_until(CallTimes::TimePoint until);
  void record_wait(CallTimes::TimePoint begin);
  void throw_if_failed();

  Work inner_;
  Communicator& communicator_;
  const std::shared_ptr<SlowRank> rank_;
  const std::shared_ptr<Transfer> transfer_;
  const CallTimes::TimePoint deadline_;
  CompletionPoller& completions_;
  std::atomic<bool> recorded_{false};
};

}  // namespace tessera::comm
