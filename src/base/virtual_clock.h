// A virtual clock: streams whose time advances only by explicit calls, for simulations.
//
// Work on such a stream runs at once on the host; its simulated duration is added to the stream's time. So a program on
// these streams performs all its actions in order, and its events have the times of the simulated machine.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// The clock of a simulated machine. Used by one thread. Streams and events share its state and may outlive it.
class TESSERA_API VirtualClock {
 public:
  /// What a simulated machine executes concurrently.
  enum class Machine : std::uint8_t {
    synchronous,   ///< host streams: work runs one after the other, as on immediate streams
    asynchronous,  ///< each stream progresses independently, and the host, which only issues, takes no time
  };
  explicit VirtualClock(Machine machine);  ///< starts at time 0
  ~VirtualClock();
  VirtualClock(const VirtualClock&) = delete;
  VirtualClock& operator=(const VirtualClock&) = delete;

  /// An immediate stream on this clock that claims to belong to `device`.
  std::unique_ptr<Stream> make_stream(Device device = {});

  bool made(const Stream& stream) const;  ///< true if this clock's make_stream() created the stream

  /// Adds `ns` to the stream's time. Throws InvalidUsage for another clock's stream; so does time_of().
  void advance(Stream& stream, std::int64_t ns);
  /// The time at which all work appended so far has run.
  std::int64_t time_of(Stream& stream) const;
  /// Later work of the stream begins at `ns` or later.
  void wait_until(Stream& stream, std::int64_t ns);

  /// The host's own time: work issued after now begins no earlier.
  std::int64_t host_time() const;
  /// The host waits until `ns`.
  void host_waits_until(std::int64_t ns);

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace tessera::base
