// Trace events: the engine's actions and their times, with one vocabulary for all that
// record, show or compare them.
#pragma once

#include <cstdint>
#include <deque>
#include <iosfwd>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/base/stream.h"

namespace tessera::base {

/// The engine's actions, which the trace records.
enum class TraceEventKind : std::uint8_t {
  unshard_issue,   ///< a gather is submitted
  unshard_wait,    ///< compute waits for a gather
  forward,         ///< computes a unit, recomputation included
  backward,        ///< computes the gradients of a unit
  reshard,         ///< the full parameters are released
  reduce_issue,    ///< a gradient reduction is submitted
  reduce_wait,     ///< compute waits for a gradient reduction
  optimizer_step,  ///< updates the parameters of a unit
};
/// "unshard_issue", ...: the names of the JSON.
TESSERA_API std::string_view name_of(TraceEventKind kind);

/// One action of one rank on one unit.
struct TraceEvent {
  TraceEventKind kind = TraceEventKind::forward;  ///< selects the row of the trace, too
  std::string unit;                               ///< name of the unit that the action concerns
  int rank = 0;                                   ///< global rank
  std::uint64_t bytes = 0;    ///< bytes passed to begin() or mark(): what the engine transfers or updates
  std::int64_t start_ns = 0;  ///< start on the stream's clock
  std::int64_t end_ns = 0;    ///< end on the same clock; equal to start_ns for a mark
  std::int64_t duration_ns() const { return end_ns - start_ns; }  ///< time from start to end
};

/// An operation of a communicator whose times are known.
struct TransferEvent {
  std::string operation;       ///< such as "all_gather"
  std::string axis;            ///< axis of the mesh, or "world"
  int rank = 0;                ///< global rank
  std::uint64_t bytes = 0;     ///< sent by this rank
  std::int64_t called_ns = 0;  ///< all that it waits for on this rank was done; clock as in TraceEvent
  std::int64_t begun_ns = 0;   ///< when its first byte had a link
  std::int64_t done_ns = 0;    ///< when the operation was done
};

class DeviceRuntime;

/// Collects the events of one rank. Times come from the streams' clocks. One thread at a time.
class TESSERA_API TraceRecorder {
 public:
  /// If `profiled` is not null, events are also ranges of its profiler, in host time, when the work is appended to
  /// streams. It must outlive the recorder.
  explicit TraceRecorder(int rank, DeviceRuntime* profiled = nullptr) : rank_(rank), profiled_(profiled) {}
  ~TraceRecorder() { close_ranges_from(0); }
  TraceRecorder(const TraceRecorder&) = delete;
  TraceRecorder& operator=(const TraceRecorder&) = delete;

  /// False stops recording; all begun events must have ended.
  void set_recording(bool recording) { recording_ = recording; }

  using Span = std::size_t;  ///< identifies a begun event until it ends
  /// Begins an event at the current end of `stream`. Returns a value that end() ignores while recording is off.
  Span begin(TraceEventKind kind, std::string_view unit, std::uint64_t bytes, Stream& stream);
  void end(Span span, Stream& stream);  ///< ends the event at the current end of `stream`
  /// An event without duration.
  void mark(TraceEventKind kind, std::string_view unit, std::uint64_t bytes, Stream& stream);

  std::size_t size() const { return pending_.size(); }  ///< events since the last drain(), ended or not

  /// Returns the ended events in the order they were begun, and clears them. Waits for their streams. Events that have
  /// not ended are dropped.
  std::vector<TraceEvent> drain();

 private:
  struct Pending {
    TraceEvent record;
    Event start;
    Event finish;
    bool ended = false;
  };
  /// Ends the ranges of this span and of later ones, which an exception may have left open.
  void close_ranges_from(Span span) noexcept;
  static constexpr Span kNone = static_cast<Span>(-1);
  const int rank_;
  DeviceRuntime* const profiled_;
  bool recording_ = true;
  std::deque<Pending> pending_;
  std::vector<Span> ranges_;  // open, outermost first
};

/// Writes the Chrome trace format (JSON), which Perfetto and chrome://tracing open. Each rank is a process; compute,
/// gather and reduce are its threads. Times are microseconds since the earliest event. Each axis of `transfers` is a
/// thread too, or several if transfers overlap; a transfer is drawn from its first byte to its end.
TESSERA_API void write_chrome_trace(std::ostream& out, std::span<const TraceEvent> events,
                                    std::span<const TransferEvent> transfers = {});

}  // namespace tessera::base
