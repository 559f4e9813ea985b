// The handle of an operation in flight.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <utility>

#include "tessera/base/deadline.h"
#include "tessera/base/export.h"
#include "tessera/base/process.h"
#include "tessera/base/stream.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

/// Called once an operation has ended: with its error, or null if it succeeded. Must be short, since it may delay other
/// operations of its rank; must not throw, wait for an operation or destroy a communicator.
using WorkCallback = std::function<void(std::exception_ptr error)>;

/// A backend's implementation of a Work. Reference-counted by its handles; recycle() returns it to the backend's pool.
class TESSERA_API WorkState {
 public:
  WorkState() = default;
  WorkState(const WorkState&) = delete;
  WorkState& operator=(const WorkState&) = delete;

  /// True if it has completed or failed. May drive progress; never blocks.
  virtual bool done() noexcept = 0;
  /// Waits until it has completed or failed, or until `until`. False: still in flight. Throws its error.
  virtual bool wait_until(std::chrono::steady_clock::time_point until) = 0;
  /// Waits, at most until the operation's deadline, at which it fails. Throws its error.
  virtual void wait() = 0;
  /// Later work of `stream` runs after this operation. By default a host stream waits.
  virtual void wait_on(Stream& stream);
  /// Calls `callback` as Work::on_done() does. Empty: only ensures that the operation ends without a handle or a
  /// waiting thread. May be called while another thread waits.
  virtual void on_done(WorkCallback callback) = 0;

  /// Whether a parent made it and this process is a fork, in which nothing progresses it.
  bool is_parents() const noexcept { return made_in_ != base::forks_so_far(); }
  void retain() noexcept { handles_.fetch_add(1, std::memory_order_relaxed); }  ///< adds a handle
  /// Removes a handle, and recycles the state after the last one. Thread-safe.
  void release() noexcept {
    if (handles_.fetch_sub(1, std::memory_order_acq_rel) == 1) recycle();
  }

 protected:
  virtual ~WorkState();
  virtual void recycle() noexcept = 0;  ///< the last handle is gone

 private:
  std::atomic<std::uint32_t> handles_{0};
  const std::uint32_t made_in_ = base::count_forks();
};

/// Keeps an operation from being recycled, without waiting for it as a Work does.
class WorkRef {
 public:
  explicit WorkRef(WorkState& state) : state_(state) { state_.retain(); }    ///< adds a handle to `state`
  WorkRef(const WorkRef& other) : state_(other.state_) { state_.retain(); }  ///< adds another one
  ~WorkRef() { state_.release(); }
  WorkRef& operator=(const WorkRef&) = delete;
  WorkState& operator*() const noexcept { return state_; }    ///< the operation
  WorkState* operator->() const noexcept { return &state_; }  ///< the operation

 private:
  WorkState& state_;
};

/// The error of an operation that has ended; null if it succeeded.
TESSERA_API std::exception_ptr error_of(WorkState& ended) noexcept;

/// The handle of an operation in flight, or of a completed one (by default, and for small ones that complete inside the
/// call).
///
/// Done means that the result is available and no peer still reads the input. After a failure, waiting throws only once
/// the backend can no longer write the caller's memory. The destructor also waits, at most until the operation's
/// deadline, and drops the error, which the next call on the communicator throws again. After wait_on() the destructor
/// doesn't wait, since the stream does. Move-only; used by one thread at a time; must not outlive its Communicator
/// unwaited.
class TESSERA_API Work {
 public:
  Work() = default;
  /// A handle of `state`; null: a completed operation.
  explicit Work(WorkState* state) noexcept : state_(state) {
    if (state_ != nullptr) state_->retain();
  }
  /// Leaves `other` as a completed operation, without waiting.
  Work(Work&& other) noexcept
      : state_(std::exchange(other.state_, nullptr)), handed_(std::exchange(other.handed_, false)) {}
  /// Waits for the current operation, as the destructor does, and leaves `other` as a completed one.
  Work& operator=(Work&& other) noexcept;
  ~Work() { finish(); }

  /// True if it has completed or failed; wait() then returns or throws at once. May drive progress; never blocks.
  bool done() { return state_ == nullptr || state_->done(); }
  /// Waits until it is done. Throws the operation's error (Timeout, PeerLost, Aborted, Mismatch, ...) on every call.
  void wait() {
    if (state_ != nullptr) state_->wait();
  }
  /// Waits at most this long. False: still in flight, and nothing has changed.
  bool wait_for(std::chrono::milliseconds time) { return wait_until(base::deadline_after(time)); }
  /// The same as wait_for(), until a point in time.
  bool wait_until(std::chrono::steady_clock::time_point until) {
    return state_ == nullptr || state_->wait_until(until);
  }
  /// Work appended to `stream` after this call runs after this operation. An immediate stream waits in the call; a lazy
  /// one waits (and throws) when it runs. The Work may be destroyed at once.
  void wait_on(Stream& stream) {
    if (state_ == nullptr) return;
    state_->wait_on(stream);
    handed_ = true;
  }
  /// Calls `callback` once the operation has ended, even if this handle is gone by then: in this call if it has already
  /// ended, otherwise in a thread of the communicator, without locks. No call that issues operations runs callbacks of
  /// earlier ones. The Work can still be waited for, which may return before the callback does. The communicator's
  /// destructor waits for its callbacks. Throws Unsupported where operations move nothing (Capabilities).
  void on_done(WorkCallback callback);
  /// Leaves a completed operation, without waiting: this one continues, and its buffers must stay valid until it has
  /// ended, as on_done() or the communicator's destructor tells. Its error is thrown by the next call on the
  /// communicator.
  void detach() noexcept;

 private:
  void finish() noexcept;
  WorkState* state_ = nullptr;
  bool handed_ = false;
};

}  // namespace tessera::comm
