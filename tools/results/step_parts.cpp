#include "tools/results/step_parts.h"

#include <algorithm>
#include <iterator>
#include <vector>

namespace tessera::tools {

using base::TraceEvent;
using base::TraceEventKind;

namespace {

using Part = double StepParts::*;

/// A time that belongs to a part, except for what lies inside it.
struct Stretch {
  std::int64_t begin = 0, end = 0;
  Part part = &StepParts::rest;
};

Part part_of(TraceEventKind kind) {
  switch (kind) {
    case TraceEventKind::forward:
    case TraceEventKind::backward:
      return &StepParts::compute;
    case TraceEventKind::optimizer_step:
      return &StepParts::optimizer;
    default:
      return &StepParts::issue;  // of a wait: what its operations do after they came, such as decoding
  }
}

/// What a wait consists of, one after the other.
std::array<Stretch, 3> parts_of(const comm::LinkWait& wait) {
  const std::int64_t called = std::clamp(wait.all_called_ns, wait.begin_ns, wait.end_ns);
  const std::int64_t through = std::clamp(wait.through_ns, called, wait.end_ns);
  return {{{wait.begin_ns, called, &StepParts::late},
           {called, through, &StepParts::exposed},
           {through, wait.end_ns, &StepParts::transport}}};
}

/// Adds each moment of the step to the innermost stretch that holds it.
class Cut {
 public:
  Cut(std::int64_t begin, std::int64_t end) : now_(begin) { open_.push_back({begin, end, &StepParts::rest}); }

  /// In the order of their begins, the outer one first.
  void add(const Stretch& stretch) {
    const std::int64_t begin = std::clamp(stretch.begin, now_, open_.front().end);
    close_until(begin);
    pass(begin);
    open_.push_back({begin, std::clamp(stretch.end, begin, open_.back().end), stretch.part});
  }
  StepParts finish() {
    while (!open_.empty()) close();
    return parts_;
  }

 private:
  void close_until(std::int64_t time) {
    while (open_.size() > 1 && open_.back().end <= time) close();
  }
  void close() {
    pass(open_.back().end);
    open_.pop_back();
  }
  void pass(std::int64_t until) {
    parts_.*open_.back().part += static_cast<double>(until - now_) / 1e6;
    now_ = until;
  }

  std::int64_t now_;
  std::vector<Stretch> open_;  // outermost first
  StepParts parts_;
};

}  // namespace

bool is_wait(const TraceEvent& event) {
  return event.kind == TraceEventKind::unshard_wait || event.kind == TraceEventKind::reduce_wait;
}

std::int64_t exposed_ns(std::span<const TraceEvent> events) {
  std::int64_t sum = 0;
  for (const TraceEvent& event : events) sum += is_wait(event) ? event.duration_ns() : 0;
  return sum;
}

StepParts cut_step(std::int64_t begin_ns, std::int64_t end_ns, std::span<const TraceEvent> events,
                   const comm::LinkRecord& link) {
  std::vector<Stretch> stretches;
  for (const TraceEvent& event : events) stretches.push_back({event.start_ns, event.end_ns, part_of(event.kind)});
  for (const comm::LinkWait& wait : link.waits) std::ranges::copy(parts_of(wait), std::back_inserter(stretches));
  std::erase_if(stretches,
                [&](const Stretch& s) { return s.end <= s.begin || s.end <= begin_ns || s.begin >= end_ns; });
  std::ranges::stable_sort(stretches, [](const Stretch& a, const Stretch& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.end > b.end;
  });
  Cut cut(begin_ns, end_ns);
  for (const Stretch& stretch : stretches) cut.add(stretch);
  StepParts parts = cut.finish();
  for (const comm::LinkCall& call : link.calls) {
    if (call.called_ns < begin_ns || call.called_ns > end_ns) continue;
    parts.volume += static_cast<double>(call.occupied_ns) / 1e6;
    parts.latency += static_cast<double>(call.latency_ns) / 1e6;
  }
  return parts;
}

StepParts mean_of(std::span<const StepParts> parts) {
  StepParts mean;
  for (const StepParts& one : parts)
    for (const auto& [name, part] : kStepParts) mean.*part += one.*part / static_cast<double>(parts.size());
  return mean;
}

nlohmann::ordered_json to_json(const StepParts& parts) {
  nlohmann::ordered_json json;
  for (const auto& [name, part] : kStepParts) json[name] = parts.*part;
  return json;
}

StepParts parse_step_parts(const base::JsonReader& json) {
  StepParts parts;
  for (const auto& [name, part] : kStepParts) parts.*part = json.at(name);
  return parts;
}

}  // namespace tessera::tools
