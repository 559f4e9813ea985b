// Streams and events: ordered work, and points in that order that other streams can wait for.
//
// The engine never blocks the host; it declares the order of work. On the CPU a stream is *immediate*: run() executes
// at once. The *lazy* stream executes only when its work is waited for, as a GPU may run arbitrarily late, so a missing
// dependency reads stale data on any machine. Allocation is not deferred: memory passed from one operation to the
// next is safe on one stream; between streams it needs an event.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "tessera/base/device.h"
#include "tessera/base/export.h"
#include "tessera/base/fp_environment.h"

namespace tessera::base {

/// A point in a stream's order. A cheap handle; a default-constructed one is always reached. Only the thread that uses
/// the stream may use it; a device's events may be used by any thread.
class TESSERA_API Event {
 public:
  /// A stream's implementation of its events, shared by their handles.
  class State {
   public:
    virtual ~State();
    virtual bool done() const = 0;       ///< true once the event is reached; never blocks
    virtual void wait() = 0;             ///< the host waits; rethrows what the stream's work threw
    virtual std::int64_t time_ns() = 0;  ///< when the event was reached, on the stream's clock; waits for it
  };
  Event() = default;
  explicit Event(std::shared_ptr<State> state) : state_(std::move(state)) {}  ///< null: an event that is always reached
  bool done() const { return state_ == nullptr || state_->done(); }  ///< true once the event is reached; never blocks
  /// The host waits until the event is reached. Rethrows what the stream's work threw.
  void wait() const {
    if (state_ != nullptr) state_->wait();
  }
  /// When it was reached, in ns of the stream's clock; waits for it. 0 for a default-constructed event. Throws
  /// InvalidUsage if record_timed() has not made it and the stream has no time for others.
  std::int64_t time_ns() const { return state_ == nullptr ? 0 : state_->time_ns(); }
  const std::shared_ptr<State>& state() const { return state_; }  ///< null for a default-constructed event

 private:
  std::shared_ptr<State> state_;
};

/// An ordered queue of work. Used by one thread at a time.
class TESSERA_API Stream {
 public:
  virtual ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  Device device() const { return device_; }  ///< the device whose work it orders
  /// True if run() finishes the work before it returns.
  bool immediate() const { return immediate_; }

  /// Appends work. Its captures must stay valid until it has run. A host stream runs it in the default FpEnvironment.
  template <class F>
  void run(F&& work) {
    if (immediate_) {
      const FpEnvironment environment;
      std::forward<F>(work)();
    } else {
      enqueue(std::function<void()>(std::forward<F>(work)));
    }
  }

  /// Keeps `thing` alive until the work appended so far has run: memory that the host releases while a stream may still
  /// use it. If a device's memory is reused only in this stream's order, `thing` is released at once.
  virtual void hold(std::shared_ptr<const void> thing) {
    if (!immediate_) enqueue([thing = std::move(thing)] {});
  }

  virtual Event record() = 0;  ///< an event that is reached when everything appended so far has run
  /// Such an event whose time_ns() may be called: a device keeps times only of these, since that costs.
  virtual Event record_timed() { return record(); }
  /// Work appended from here on runs after `event`.
  virtual void wait(const Event& event) = 0;
  /// The host waits until everything appended so far has run.
  void synchronize() { record().wait(); }

 protected:
  /// `immediate`: run() executes its argument itself and never calls enqueue().
  Stream(Device device, bool immediate) : device_(device), immediate_(immediate) {}
  virtual void enqueue(std::function<void()> work) = 0;  ///< appends `work`, which is executed once, in order

 private:
  const Device device_;
  const bool immediate_;
};

/// A host stream whose run() executes its argument at once.
TESSERA_API std::unique_ptr<Stream> make_immediate_stream();
/// A host stream that executes its work only when an event or the stream is waited for.
TESSERA_API std::unique_ptr<Stream> make_lazy_stream();

/// Nanoseconds of the steady clock, which is the clock of host streams.
TESSERA_API std::int64_t host_time_ns();

}  // namespace tessera::base
