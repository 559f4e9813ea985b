// Time that only passes where somebody says so: streams that have a clock instead of a machine under them.
//
// Work on such a stream runs at once on the host; what it would have taken is added to the stream's time. So a program
// whose streams they are goes through all it does in the order in which it does it, and its events have the times of
// the machine that is simulated.
#pragma once

#include <cstdint>
#include <memory>

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// Used by one thread. Streams and events share what it holds, and may outlive it.
class TESSERA_API VirtualClock {
 public:
  enum class Machine : std::uint8_t {
    host,    ///< streams are the host's: one thing after the other, as on immediate streams
    device,  ///< each stream goes on by itself, and the host, which only issues, takes no time
  };
  explicit VirtualClock(Machine machine);
  ~VirtualClock();
  VirtualClock(const VirtualClock&) = delete;
  VirtualClock& operator=(const VirtualClock&) = delete;

  std::unique_ptr<Stream> make_stream(Device device = {});

  bool made(const Stream& stream) const;

  /// The stream's work takes so much longer. Throws InvalidUsage for another clock's stream; so does time_of().
  void advance(Stream& stream, std::int64_t ns);
  /// When all work appended so far has run.
  std::int64_t time_of(Stream& stream) const;
  /// What comes next on the stream begins at `ns` or later.
  void wait_until(Stream& stream, std::int64_t ns);

  /// The host's own time: work that is issued from here on begins no earlier.
  std::int64_t host_time() const;
  /// The host waits until `ns`.
  void host_waits_until(std::int64_t ns);

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace tessera::base
