// Progresses staged calls, for all communicators of a rank: two streams for copies, and a thread that works while no
// caller waits.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/comm/algorithms.h"
#include "tessera/comm/kernels/reduce.h"
#include "tessera/comm/staging/ipc_windows.h"
#include "tessera/comm/staging/staged_operation.h"

namespace tessera::comm::staging {

/// A call of the device may block until a stream goes on that waits for an operation, and the thread that progresses
/// the operation may need the same call. So a thread that never calls the device expires operations that are not over
/// some time after their deadline: the stream goes on, and the operation fails. Thread-safe.
class DeadlineWatch {
 public:
  /// An operation that can be progressed fails at its deadline by itself, and is over within this time.
  static constexpr std::chrono::seconds kGrace{1};

  DeadlineWatch();
  ~DeadlineWatch();
  DeadlineWatch(const DeadlineWatch&) = delete;
  DeadlineWatch& operator=(const DeadlineWatch&) = delete;

  void add(StagedOperation& operation);
  /// Afterwards the operation is not expired any more.
  void remove(StagedOperation& operation) noexcept;

 private:
  void run() noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<StagedOperation*> operations_;
  std::chrono::steady_clock::time_point wake_;  ///< when the thread looks next
  bool stop_ = false;
  std::thread thread_;
};

/// No work on the two streams ever waits: dependencies of a call are polled first. So copies of one call never queue
/// behind the dependencies of another, which might include that very call.
class StagingPipeline {
 public:
  StagingPipeline(std::shared_ptr<DeviceRuntime> device, StagingOptions options);
  ~StagingPipeline();

  DeviceRuntime& device() noexcept { return *device_; }
  const std::shared_ptr<DeviceRuntime>& shared_device() const noexcept { return device_; }
  const StagingOptions& options() const noexcept { return options_; }
  /// All ranks of the world have agreed that device memory uses windows. Called once, before anything else.
  void share(AlgorithmTable algorithms) {
    windows_ = std::make_shared<IpcWindows>(device_);
    sums_ = device_->find<DeviceReduceKernels>();
    algorithms_ = std::move(algorithms);
  }
  /// Null: device memory is staged.
  const std::shared_ptr<IpcWindows>& windows() const noexcept { return windows_; }
  /// Null: this device has none.
  const DeviceReduceKernels* sums() const noexcept { return sums_; }
  /// The algorithms that the user selected.
  const AlgorithmTable& algorithms() const noexcept { return algorithms_; }
  /// Guards all state of staged communicators, and the inner communicators while anything is in flight on them.
  std::mutex& mutex() noexcept { return mutex_; }
  DeadlineWatch& watch() noexcept { return watch_; }
  Stream& down() noexcept { return *down_; }
  Stream& up() noexcept { return *up_; }

  /// Under the lock.
  void add(StagedOperation& operation);
  /// Progresses everything, unless another thread does. True: something progressed.
  bool try_advance() noexcept;
  /// Drives until `condition`, which is evaluated without the lock, or until `until`. True: it holds.
  bool poll_until(const std::function<bool()>& condition, Clock::time_point until);

 private:
  bool advance_locked() noexcept;
  void run() noexcept;

  const std::shared_ptr<DeviceRuntime> device_;
  const StagingOptions options_;
  const std::unique_ptr<Stream> down_;
  const std::unique_ptr<Stream> up_;
  std::shared_ptr<IpcWindows> windows_;
  const DeviceReduceKernels* sums_ = nullptr;
  AlgorithmTable algorithms_;
  std::mutex mutex_;
  std::condition_variable work_;
  std::vector<StagedOperation*> active_;  ///< in the order of their calls
  std::atomic<int> waiters_{0};
  bool stop_ = false;
  DeadlineWatch watch_;
  std::thread thread_;
};

}  // namespace tessera::comm::staging
