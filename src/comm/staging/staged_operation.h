// One call in flight on a staged communicator: a state machine that any driving thread progresses.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <string>

#include "tessera/base/device_runtime.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/staging/staged_transfer.h"

namespace tessera::comm::staging {

using Clock = std::chrono::steady_clock;

class StagingPipeline;
class StagedCommunicator;

class StagedOperation final : public WorkState {
 public:
  static constexpr std::uint32_t kGood = 1;
  static constexpr std::uint32_t kFailed = 2;

  StagedOperation(std::shared_ptr<StagingPipeline> engine, StagedCommunicator& communicator,
                  std::span<const OpDesc> calls, Event after);

  bool done() noexcept override;
  bool wait_until(Clock::time_point until) override;
  void wait() override;
  void wait_on(Stream& stream) override;
  void on_done(WorkCallback callback) override;

  // Any thread:
  Clock::time_point deadline() const noexcept { return deadline_; }
  /// The device does not respond: fails the communicator, and lets streams go on that wait for this.
  void expire() noexcept;

  // Under the engine's lock:
  bool advance() noexcept;
  bool finished() const noexcept { return finished_.load() != 0; }
  StagedCommunicator& communicator() noexcept { return communicator_; }
  StagingPipeline& engine() noexcept { return *engine_; }
  std::string_view label() const noexcept { return label_; }
  /// Never zero, so that a call begun after its deadline fails by itself.
  std::chrono::milliseconds time_left() const;
  std::deque<StagedTransfer>& parts() noexcept { return parts_; }

 protected:
  void recycle() noexcept override { delete this; }

 private:
  ~StagedOperation() override = default;
  bool begun();
  bool advance_parts();
  void check_deadline();
  std::string late(std::string_view what) const;
  void fail(std::exception_ptr error) noexcept;
  void finish() noexcept;

  const std::shared_ptr<StagingPipeline> engine_;
  StagedCommunicator& communicator_;  ///< while in flight
  const Clock::time_point deadline_;
  const std::chrono::milliseconds timeout_;
  const std::string name_;
  const std::string label_;
  Event after_;
  bool begun_ = false;
  std::deque<StagedTransfer> parts_;
  std::exception_ptr error_;
  std::unique_ptr<HostEvent> signal_;
  Event reached_;
  std::atomic<bool> expired_{false};
  std::atomic<std::uint32_t> finished_{0};
};

}  // namespace tessera::comm::staging
