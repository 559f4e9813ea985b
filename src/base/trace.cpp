#include "tessera/base/trace.h"

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <ostream>
#include <set>
#include <utility>

#include "tessera/base/device_runtime.h"

namespace tessera::base {
namespace {

constexpr std::array<std::string_view, 8> kNames = {"unshard_issue", "unshard_wait", "forward",     "backward",
                                                    "reshard",       "reduce_issue", "reduce_wait", "optimizer_step"};

struct Track {
  int id;
  const char* name;
};

Track track_of(TraceEventKind kind) {
  switch (kind) {
    case TraceEventKind::unshard_issue:
    case TraceEventKind::reshard:
      return {2, "gather"};
    case TraceEventKind::reduce_issue:
      return {3, "reduce"};
    case TraceEventKind::unshard_wait:
    case TraceEventKind::reduce_wait:
      return {1, "waiting"};
    default:
      return {0, "compute"};
  }
}

}  // namespace

std::string_view name_of(TraceEventKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

TraceRecorder::Span TraceRecorder::begin(TraceEventKind kind, std::string_view unit, std::uint64_t bytes,
                                         Stream& stream) {
  if (!recording_) return kNone;
  Pending& pending = pending_.emplace_back();
  pending.record = TraceEvent{kind, std::string(unit), rank_, bytes};
  const Span span = pending_.size() - 1;
  if (profiled_ != nullptr) {
    ranges_.push_back(span);
    profiled_->range_begin(name_of(kind), unit);
  }
  pending.start = stream.record();
  return span;
}

void TraceRecorder::close_ranges_from(Span span) noexcept {
  for (; !ranges_.empty() && ranges_.back() >= span; ranges_.pop_back()) profiled_->range_end();
}

void TraceRecorder::end(Span span, Stream& stream) {
  if (span == kNone) return;
  pending_.at(span).finish = stream.record();
  pending_.at(span).ended = true;
  close_ranges_from(span);
}

void TraceRecorder::mark(TraceEventKind kind, std::string_view unit, std::uint64_t bytes, Stream& stream) {
  const Span span = begin(kind, unit, bytes, stream);
  if (span == kNone) return;
  pending_[span].finish = pending_[span].start;
  pending_[span].ended = true;
  close_ranges_from(span);
}

std::vector<TraceEvent> TraceRecorder::drain() {
  close_ranges_from(0);
  const std::deque<Pending> taken = std::exchange(pending_, {});  // cleared even if a stream's work threw
  std::vector<TraceEvent> records;
  records.reserve(taken.size());
  for (const Pending& pending : taken) {
    if (!pending.ended) continue;
    TraceEvent& record = records.emplace_back(pending.record);
    record.start_ns = pending.start.time_ns();
    record.end_ns = pending.finish.time_ns();
  }
  return records;
}

namespace {

/// A trace as JSON. Times are microseconds since `origin`.
class ChromeTrace {
 public:
  explicit ChromeTrace(std::int64_t origin) : origin_(origin) {}

  void add(const TraceEvent& e) {
    const Track track = track_of(e.kind);
    name_rows(e.rank, track.id, track.name);
    nlohmann::json entry = {{"name", std::string(name_of(e.kind)) + " " + e.unit},
                            {"cat", name_of(e.kind)},
                            {"pid", e.rank},
                            {"tid", track.id},
                            {"ts", microseconds(e.start_ns - origin_)},
                            {"args", {{"unit", e.unit}, {"bytes", e.bytes}}}};
    add(std::move(entry), e.duration_ns());
  }

  void add(const TraceTransfer& t) {
    constexpr int kFirst = 100;  // beyond those of events
    const auto found = std::find(tracks_.begin(), tracks_.end(), t.track);
    const auto id = kFirst + static_cast<int>(found - tracks_.begin());
    if (found == tracks_.end()) tracks_.push_back(t.track);
    name_rows(t.rank, id, t.track);
    nlohmann::json entry = {{"name", t.operation},
                            {"cat", "transfer"},
                            {"pid", t.rank},
                            {"tid", id},
                            {"ts", microseconds(t.start_ns - origin_)},
                            {"args",
                             {{"bytes_sent", t.bytes_sent},
                              {"called_us", microseconds(t.called_ns - origin_)},
                              {"waited_us", microseconds(t.start_ns - t.called_ns)}}}};
    add(std::move(entry), t.end_ns - t.start_ns);
  }

  nlohmann::json document() && { return {{"traceEvents", std::move(entries_)}, {"displayTimeUnit", "ms"}}; }

 private:
  static double microseconds(std::int64_t ns) { return static_cast<double>(ns) / 1000.0; }
  /// Once for each row: a rank is a process, a track a thread.
  void name_rows(int rank, int track, std::string_view name) {
    const auto meta = [&](const char* what, int tid, const std::string& text) {
      nlohmann::json entry = {{"ph", "M"}, {"name", what}, {"pid", rank}, {"args", {{"name", text}}}};
      if (tid >= 0) entry["tid"] = tid;
      entries_.push_back(std::move(entry));
    };
    if (named_.insert({rank, -1}).second) meta("process_name", -1, "rank " + std::to_string(rank));
    if (named_.insert({rank, track}).second) meta("thread_name", track, std::string(name));
  }
  void add(nlohmann::json entry, std::int64_t duration_ns) {
    if (duration_ns > 0) {
      entry["ph"] = "X";
      entry["dur"] = microseconds(duration_ns);
    } else {
      entry["ph"] = "i";
      entry["s"] = "t";
    }
    entries_.push_back(std::move(entry));
  }

  const std::int64_t origin_;
  nlohmann::json entries_ = nlohmann::json::array();
  std::set<std::pair<int, int>> named_;
  std::vector<std::string> tracks_;
};

}  // namespace

void write_chrome_trace(std::ostream& out, std::span<const TraceEvent> events,
                        std::span<const TraceTransfer> transfers) {
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const TraceEvent& e : events) origin = std::min(origin, e.start_ns);
  for (const TraceTransfer& t : transfers) origin = std::min(origin, t.start_ns);
  ChromeTrace trace(origin);
  for (const TraceEvent& e : events) trace.add(e);
  for (const TraceTransfer& t : transfers) trace.add(t);
  out << std::move(trace).document().dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
      << "\n";  // a name may hold any bytes
}

}  // namespace tessera::base
