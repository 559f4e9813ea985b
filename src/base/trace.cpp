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
  pending.start = stream.record_timed();
  return span;
}

void TraceRecorder::close_ranges_from(Span span) noexcept {
  for (; !ranges_.empty() && ranges_.back() >= span; ranges_.pop_back()) profiled_->range_end();
}

void TraceRecorder::end(Span span, Stream& stream) {
  if (span == kNone) return;
  pending_.at(span).finish = stream.record_timed();
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

using nlohmann::json;

/// The entries of a Chrome trace, with the names of the rows.
class ChromeTrace {
 public:
  explicit ChromeTrace(std::int64_t origin) : origin_(origin) {}

  void add(const TraceEvent& e) {
    const Track track = track_of(e.kind);
    name(e.rank, track.id, track.name);
    json entry = {{"name", std::string(name_of(e.kind)) + " " + e.unit},
                  {"cat", name_of(e.kind)},
                  {"pid", e.rank},
                  {"tid", track.id},
                  {"ts", microseconds(e.start_ns)},
                  {"args", {{"unit", e.unit}, {"bytes", e.bytes}}}};
    if (e.end_ns > e.start_ns) {
      entry["ph"] = "X";
      entry["dur"] = static_cast<double>(e.duration_ns()) / 1000.0;
    } else {
      entry["ph"] = "i";
      entry["s"] = "t";
    }
    entries_.push_back(std::move(entry));
  }

  void add(const TransferEvent& e) {
    const int row = row_of(e);
    entries_.push_back({{"name", e.operation},
                        {"cat", "transfer"},
                        {"ph", "X"},
                        {"pid", e.rank},
                        {"tid", row},
                        {"ts", microseconds(e.begun_ns)},
                        {"dur", static_cast<double>(e.done_ns - e.begun_ns) / 1000.0},
                        {"args",
                         {{"axis", e.axis},
                          {"bytes", e.bytes},
                          {"called", microseconds(e.called_ns)},
                          {"begun", microseconds(e.begun_ns)},
                          {"done", microseconds(e.done_ns)}}}});
  }

  const json& entries() const { return entries_; }

 private:
  struct Row {
    int rank = 0;
    std::string axis;
    int id = 0;
    std::int64_t free_ns = 0;  // its last transfer is done
  };

  double microseconds(std::int64_t ns) const { return static_cast<double>(ns - origin_) / 1000.0; }

  /// The first row of the axis on which no transfer is in flight, since those of a row must not overlap.
  int row_of(const TransferEvent& e) {
    int rows = 0;
    for (Row& row : rows_) {
      if (row.rank != e.rank || row.axis != e.axis) continue;
      ++rows;
      if (row.free_ns > e.begun_ns) continue;
      row.free_ns = e.done_ns;
      return row.id;
    }
    const int id = kFirstTransferTrack + static_cast<int>(rows_.size());
    rows_.push_back({e.rank, e.axis, id, e.done_ns});
    name(e.rank, id, "transfers " + e.axis + (rows == 0 ? "" : " " + std::to_string(rows + 1)));
    return id;
  }

  /// Names the process and the row when they are first used.
  void name(int rank, int track, const std::string& text) {
    if (named_.insert({rank, -1}).second)
      entries_.push_back(
          {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", "rank " + std::to_string(rank)}}}});
    if (named_.insert({rank, track}).second)
      entries_.push_back(
          {{"ph", "M"}, {"name", "thread_name"}, {"pid", rank}, {"tid", track}, {"args", {{"name", text}}}});
  }

  static constexpr int kFirstTransferTrack = 4;
  const std::int64_t origin_;
  json entries_ = json::array();
  std::set<std::pair<int, int>> named_;
  std::vector<Row> rows_;
};

}  // namespace

void write_chrome_trace(std::ostream& out, std::span<const TraceEvent> events,
                        std::span<const TransferEvent> transfers) {
  std::int64_t origin = std::numeric_limits<std::int64_t>::max();
  for (const TraceEvent& e : events) origin = std::min(origin, e.start_ns);
  for (const TransferEvent& e : transfers) origin = std::min(origin, e.begun_ns);
  ChromeTrace trace(origin);
  for (const TraceEvent& e : events) trace.add(e);
  std::vector<const TransferEvent*> by_begin;
  for (const TransferEvent& e : transfers) by_begin.push_back(&e);
  std::ranges::stable_sort(by_begin,
                           [](const TransferEvent* a, const TransferEvent* b) { return a->begun_ns < b->begun_ns; });
  for (const TransferEvent* e : by_begin) trace.add(*e);
  const json document = {{"traceEvents", trace.entries()}, {"displayTimeUnit", "ms"}};
  out << document.dump(-1, ' ', false, json::error_handler_t::replace) << "\n";  // a name may hold any bytes
}

}  // namespace tessera::base
