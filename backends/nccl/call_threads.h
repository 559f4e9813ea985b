// Threads that call NCCL for a rank: a call may block until other ranks make theirs, and no caller may wait longer than
// its deadline.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>

namespace tessera::comm::nccl {

/// A rank whose threads use one communicator at a time needs one thread here. Calls of different communicators may
/// block each other across ranks if they queue in one thread, so a call that finds all threads busy gets a new one.
/// Thread-safe.
class CallThreads {
 public:
  /// One call; shared with the thread that makes it, which may outlast the caller's interest.
  class Call {
   public:
    explicit Call(std::function<void()> what) : what_(std::move(what)) {}
    bool done() const noexcept { return done_.load(std::memory_order_acquire); }
    /// Throws what the call threw. Only once it is done.
    void rethrow() const {
      if (error_) std::rethrow_exception(error_);
    }

   private:
    friend class CallThreads;
    std::function<void()> what_;
    std::exception_ptr error_;
    std::atomic<bool> done_{false};
  };

  /// Each thread calls `prepare` before its first call, which fails if that throws.
  explicit CallThreads(std::function<void()> prepare = {});
  /// Leaves behind threads whose calls never return; joins the others.
  ~CallThreads();
  CallThreads(const CallThreads&) = delete;
  CallThreads& operator=(const CallThreads&) = delete;

  /// Calls `what` in another thread; what it refers to must live until the call is done. Throws SystemError if a thread
  /// is needed and can't be started.
  std::shared_ptr<const Call> start(std::function<void()> what);
  /// Number of threads so far.
  int count() const;

 private:
  struct Worker;
  struct State;
  static void run(State& state, Worker& worker);

  const std::shared_ptr<State> state_;
};

}  // namespace tessera::comm::nccl
