// The handle of an operation in flight.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <utility>

#include "tessera/base/export.h"
#include "tessera/base/stream.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// What a backend implements behind a Work. Counted by its handles; recycle() gives it back to its backend's pool.
class TESSERA_API WorkState {
 public:
  WorkState() = default;
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  /// Finished, well or not. May drive progress; never blocks.
  virtual bool done() noexcept = 0;
  /// Waits until finished or `until`. False: not finished yet. Throws what went wrong.
  virtual bool wait_until(std::chrono::steady_clock::time_point until) = 0;
  /// Waits, at longest until the operation's own deadline, at which it fails. Throws what went wrong.
  virtual void wait() = 0;
  /// `stream`'s later work runs after this operation. The default makes a host stream wait.
  virtual void wait_on(Stream& stream);

  void retain() noexcept { handles_.fetch_add(1, std::memory_order_relaxed); }
  void release() noexcept {
    if (handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) recycle();
  }

 protected:
  virtual ~WorkState();
  virtual void recycle() noexcept = 0;  ///< the last handle is gone

 private:
  std::atomic<std::uint32_t> handles_{0};
};

/// Keeps an operation from being recycled, without waiting for it as a Work would.
class WorkRef {
 public:
  explicit WorkRef(WorkState& state) : state_(state) { state_.retain(); }
  ~WorkRef() { state_.release(); }
  WorkRef(const WorkRef&) = delete;
  WorkRef& operator=(const WorkRef&) = delete;

 private:
  WorkState& state_;
};

/// An operation in flight, or (by default, and for small ones that finished inside their call) a finished one.
///
/// Done means: the result is there, and no peer still reads the input. After a failure, waiting throws only when the
/// backend can no longer write the caller's memory. The destructor waits too (and swallows the error, which the next
/// call on the communicator throws again), at longest until the operation's deadline; after wait_on() it does not: the
/// stream waits. Move-only; used by one thread at a time; must not outlive its Communicator unwaited.
class TESSERA_API Work {
 public:
  Work() = default;
  explicit Work(WorkState* state) noexcept : state_(state) {
    if (state_ != nullptr) state_->retain();
  }
  Work(Work&& other) noexcept
      : state_(std::exchange(other.state_, nullptr)), handed_(std::exchange(other.handed_, false)) {}
  Work& operator=(Work&& other) noexcept;
  ~Work() { finish(); }

  /// Finished, well or not; wait() then returns or throws at once. May drive progress; never blocks.
  bool done() { return state_ == nullptr || state_->done(); }
  /// Waits until finished. Throws the operation's error (Timeout, PeerLost, Aborted, Mismatch, ...), each time it is
  /// called.
  void wait() {
    if (state_ != nullptr) state_->wait();
  }
  /// Waits at most this long. False: not finished yet, and nothing has changed.
  bool wait_for(std::chrono::milliseconds time) { return wait_until(std::chrono::steady_clock::now() + time); }
  bool wait_until(std::chrono::steady_clock::time_point until) {
    return state_ == nullptr || state_->wait_until(until);
  }
  /// What is appended to `stream` from here on runs after this operation. An immediate stream waits here; a lazy one
  /// waits (and throws) where it runs. The Work may be dropped at once.
  void wait_on(Stream& stream) {
    if (state_ == nullptr) return;
    state_->wait_on(stream);
    handed_ = true;
  }

 private:
  void finish() noexcept;
  WorkState* state_ = nullptr;
  bool handed_ = false;
};

}  // namespace tessera::comm
