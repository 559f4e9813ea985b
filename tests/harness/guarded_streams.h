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

/// Of the calling thread; host_waits() shows it.
HostWaits& waits_of_this_thread();

/// As on a device, memory is handed on in the order of the compute stream, and nothing is held until work has run. What
/// is recorded runs when it is launched, as often as that happens.
class CapturingStream : public base::Stream {
 public:
  using Works = std::vector<std::function<void()>>;
  void hold(std::shared_ptr<const void>) override {}
  void begin_capture();
  Works end_capture();

 protected:
  using Stream::Stream;
  /// True: it was recorded, and is not to be run.
  bool recorded(std::function<void()>& work);
  /// Throws where `what` would be part of a graph, and makes the recording one that can't be used.
  void refuse_in_capture(const char* what);

 private:
  std::optional<Works> recording_;
  bool broken_ = false;
};

/// Runs work at once, with the memory open.
std::unique_ptr<base::Stream> make_guarded_stream(base::Device device, std::shared_ptr<GuardedShared> shared);

/// Runs nothing before somebody asks. `deaf`: it waits for no event, as if whoever uses it had forgotten to say so.
std::unique_ptr<base::Stream> make_lazy_guarded_stream(base::Device device,
                                                       const std::shared_ptr<GuardedShared>& shared, bool deaf);

/// What comes next on a lazy stream runs so much after somebody first asked for it.
void delay_guarded_stream(base::Stream& stream, std::chrono::milliseconds time);

}  // namespace tessera::harness
