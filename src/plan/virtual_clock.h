// A virtual clock: streams whose work takes simulated time, for simulations.
//
// Work on such a stream runs at once on the host; its simulated duration becomes a task that follows the stream's
// earlier ones. So a program on these streams performs all its actions in order, and its events have the times of the
// simulated machine. Times are computed when they are first asked for, from all tasks issued until then: a transfer
// that is issued later may slow down one that was issued earlier (see task_graph.h).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/base/stream.h"
#include "tessera/plan/task_graph.h"

namespace tessera::plan {

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
  std::unique_ptr<base::Stream> make_stream(base::Device device = {});
  Machine machine() const;  ///< the constructor's

  bool made(const base::Stream& stream) const;  ///< true if this clock's make_stream() created the stream

  /// Adds work of `ns` to the stream; `label` is a literal. Throws InvalidUsage for another clock's stream, as do all
  /// functions that take one.
  void advance(base::Stream& stream, std::int64_t ns, std::string_view label = {});
  /// Adds work of `ns` to the host, after all that it waits for.
  void advance_host(std::int64_t ns, std::string_view label = {});
  /// Adds a transfer that begins when all of `after` are done. No stream waits for it yet.
  TaskId add_transfer(std::uint32_t transfer, std::span<const TaskId> after, std::string_view label = {});
  /// Determines the times of transfers from here on; it must outlive all questions for times.
  void set_transfer_model(std::shared_ptr<TransferModel> transfers);

  TaskId position(base::Stream& stream) const;       ///< the task that the stream's next work waits for
  TaskId host_position() const;                      ///< the task that the host's next action waits for
  void wait_for(base::Stream& stream, TaskId task);  ///< later work of the stream begins after `task`
  void host_waits_for(TaskId task);                  ///< the host waits for `task`

  TaskGraph::Times times_of(TaskId task) const;  ///< when it ran
  /// The time at which all work appended to the stream so far has run.
  std::int64_t time_of(base::Stream& stream) const { return times_of(position(stream)).end_ns; }
  /// The host's own time: work issued after now begins no earlier.
  std::int64_t host_time() const { return times_of(host_position()).end_ns; }
  const TaskGraph& graph() const;  ///< everything issued so far

  struct State;

 private:
  const std::shared_ptr<State> state_;
};

}  // namespace tessera::plan
