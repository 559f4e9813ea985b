// Streams of a guarded device.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/base/stream.h"
#include "tests/harness/guarded_device.h"
#include "tests/harness/guarded_memory.h"

namespace tessera::harness {

/// Wait counts of the calling thread, which host_waits() returns.
HostWaits& waits_of_this_thread();

/// As on a device, memory is reused in the order of the compute stream, and nothing is kept until work has run.
/// Recorded work runs at each launch.
class CapturingStream : public base::Stream {
 public:
  using Works = std::vector<std::function<void()>>;
  void hold(std::shared_ptr<const void>) override {}
  void begin_capture();
  Works end_capture();

 protected:
  using Stream::Stream;
  /// Whether `work` was recorded, in which case the caller must not run it.
  bool recorded(std::function<void()>& work);
  /// Throws if `what` would become part of a graph, and makes the recording unusable.
  void refuse_in_capture(const char* what);

 private:
  std::optional<Works> recording_;
  bool broken_ = false;
};

/// Runs work immediately, with the memory open.
std::unique_ptr<base::Stream> make_guarded_stream(base::Device device, std::shared_ptr<GuardedShared> shared);

/// Runs work on demand only. `deaf`: the stream waits for no event, as if its user had forgotten the dependency.
std::unique_ptr<base::Stream> make_lazy_guarded_stream(base::Device device,
                                                       const std::shared_ptr<GuardedShared>& shared, bool deaf);

/// The next work on a lazy stream runs this long after it is first polled.
void delay_guarded_stream(base::Stream& stream, std::chrono::milliseconds time);

}  // namespace tessera::harness
