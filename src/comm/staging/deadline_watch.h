// Ends operations whose driving thread is stuck in a call of the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace tessera::comm::staging {

class StagedOperation;

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

}  // namespace tessera::comm::staging
