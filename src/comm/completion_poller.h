// Calls back for operations that no thread of their own completes.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/work.h"

namespace tessera::comm {

/// A thread that polls the works of a communicator without a progress thread, such as a decorator. It starts with the
/// first one. Declare it as the communicator's last member, so that it ends first.
class TESSERA_API CompletionPoller {
 public:
  CompletionPoller() = default;
  ~CompletionPoller() { close(); }
  CompletionPoller(const CompletionPoller&) = delete;
  CompletionPoller& operator=(const CompletionPoller&) = delete;

  /// Waits until all operations have ended, at most until their deadlines, and their callbacks have returned.
  void close() noexcept;
  /// Implements WorkState::on_done() for `state`, whose done() may be called by any thread. Thread-safe.
  void add(WorkState& state, WorkCallback callback);

 private:
  struct Pending {
    WorkRef state;
    WorkCallback callback;
  };
  void run() noexcept;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Pending> added_;  ///< guarded by mutex_
  bool stop_ = false;           ///< guarded by mutex_
  std::thread thread_;          ///< guarded by mutex_ until it is joined
};

}  // namespace tessera::comm
