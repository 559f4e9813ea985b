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
    case TraceEventKind::reshard: return {2, "gather"};
    case TraceEventKind::reduce_issue: return {3, "reduce"};
    case TraceEventKind::unshard_wait:
    case TraceEventKind::reduce_wait: return {1, "waiting"};
    default: return {0, "compute"};
  }
}

}  // namespace

std::string_view name_of(TraceEventKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

TraceRecorder::Span TraceRecorder::begin(TraceEventKind kind, std::string_view unit, std::uint64_t bytes, Stream& stream) {
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

void write_chrome_trace(std::ostream& out, std::span<const TraceEvent> events) {
  using nlohmann::json;
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const TraceEvent& e : events) origin = std::min(origin, e.start_ns);
  const auto microseconds = [](std::int64_t ns) { return static_cast<double>(ns) / 1000.0; };

  json trace = json::array();
  std::set<std::pair<int, int>> named;
  for (const TraceEvent& e : events) {
    const Track track = track_of(e.kind);
    if (named.insert({e.rank, -1}).second)
      trace.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", e.rank}, {"args", {{"name", "rank " + std::to_string(e.rank)}}}});
    if (named.insert({e.rank, track.id}).second)
      trace.push_back({{"ph", "M"}, {"name", "thread_name"}, {"pid", e.rank}, {"tid", track.id}, {"args", {{"name", track.name}}}});
    json entry = {{"name", std::string(name_of(e.kind)) + " " + e.unit},
                  {"cat", name_of(e.kind)},
                  {"pid", e.rank},
                  {"tid", track.id},
                  {"ts", microseconds(e.start_ns - origin)},
                  {"args", {{"unit", e.unit}, {"bytes", e.bytes}}}};
    if (e.end_ns > e.start_ns) {
      entry["ph"] = "X";
      entry["dur"] = microseconds(e.duration_ns());
    } else {
      entry["ph"] = "i";
      entry["s"] = "t";
    }
    trace.push_back(std::move(entry));
  }
  const json document = {{"traceEvents", std::move(trace)}, {"displayTimeUnit", "ms"}};
  out << document.dump(-1, ' ', false, json::error_handler_t::replace) << "\n";  // a name may hold any bytes
}

}  // namespace tessera::base
