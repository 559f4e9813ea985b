// Streams of a guarded device.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/base/stream.h"
#include "tests/harness/guarded_device.h"
#include "tests/harness/guarded_memory.h"

namespace tessera::harness {

/// Of the calling thread; host_waits() shows it.
HostWaits& waits_of_this_thread();

/// Runs work at once, with the memory open.
std::unique_ptr<base::Stream> make_guarded_stream(base::Device device, std::shared_ptr<GuardedShared> shared);

/// Runs nothing before somebody asks. `deaf`: it waits for no event, as if whoever uses it had forgotten to say so.
std::unique_ptr<base::Stream> make_lazy_guarded_stream(base::Device device,
                                                       const std::shared_ptr<GuardedShared>& shared, bool deaf);

/// What comes next on a lazy stream runs so much after somebody first asked for it.
void delay_guarded_stream(base::Stream& stream, std::chrono::milliseconds time);

}  // namespace tessera::harness
