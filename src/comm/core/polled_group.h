// A group whose operations a progress engine advances.
#pragma once

#include <span>

#include "tessera/comm/core/group_core.h"
#include "tessera/comm/core/progress.h"

namespace tessera::comm {

/// Up to this size an operation may complete inside its call.
inline constexpr std::size_t kSmallBytes = std::size_t{1} << 20;
/// Why an operation is late if all members have called it.
inline constexpr std::string_view kUnderWay = "all ranks have called it, and it is still under way";

/// Operations are launched on the caller's thread, and accepted, advanced and completed under the engine's lock.
class PolledGroup : public GroupCore, public ActiveGroup {
 public:
  /// Polls once, and waits a moment if the operation is small: most complete here. Else returns its handle.
  Work launch(Operation& op);
  /// Under the engine's lock, as what follows: once the operations are marked as failed, the memory of the callers is
  /// no longer written.
  void fail(Failure failure, bool notify) noexcept final;
  void abort(std::string_view reason) noexcept final;
  /// On a caller's thread: fails with this cause, unless it has failed already, and throws the failure.
  [[noreturn]] void fail_call(Failure failure);

 protected:
  PolledGroup(ProgressEngine& engine, std::shared_ptr<const BackendOptions> options, int rank,
              std::vector<int> members);
  ~PolledGroup() override;
  ProgressEngine& engine() const noexcept { return engine_; }

  /// Launches `batch`, which is done when all parts are. `prepare` makes the operation of a part.
  template <class Prepare>
  Work launch_batch(Operation& batch, std::span<const OpDesc> parts, const Prepare& prepare) {
    batch.group = shared_from_this();
    batch.batch_remaining = static_cast<std::uint32_t>(parts.size());
    Work work(&batch);
    for (const OpDesc& part : parts) {
      Operation& op = prepare(part);
      op.group = batch.group;
      op.batch = &batch;
      op.start_deadline();
      submit(op);
    }
    poll_after_batch();
    return work;
  }
  /// No more operations follow: waits for those in flight. Polls don't look at the group any more.
  void finish_operations() noexcept;

  // Under the engine's lock:
  OperationQueue<Operation> take_submitted() noexcept;
  void complete(Operation& op, Operation::State state) noexcept;
  /// Completes, as failed, the operations that were taken from take_submitted(). `first`: this failure is the first.
  virtual void fail_operations(bool first) noexcept = 0;

 private:
  void submit(Operation& op) noexcept;
  void poll_after_batch() noexcept;
  void advance() noexcept final { engine_.try_poll(false); }
  bool wait_for(Operation& op, Clock::time_point until) noexcept final { return engine_.wait(op.state, until); }
  void on_done(Operation& op, WorkCallback callback) final;
  void begin_in_flight() noexcept;  ///< under mutex_
  void end_in_flight() noexcept;
  void defer_callbacks(Operation& op);
  void run_callbacks(Operation& op) noexcept;

  ProgressEngine& engine_;
  OperationQueue<Operation> submitted_;     ///< guarded by mutex_
  std::atomic<bool> any_submitted_{false};  ///< spares a poll the lock
  std::atomic<std::uint32_t> idle_{1};      ///< nothing is in flight
};

}  // namespace tessera::comm
