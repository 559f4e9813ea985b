#include "tools/results/step_timeline.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <sstream>

namespace tessera::tools {
namespace {

using base::JsonReader;
using base::TraceEvent;
using base::TraceEventKind;
using nlohmann::ordered_json;

constexpr std::size_t kEventKinds = static_cast<std::size_t>(TraceEventKind::optimizer_step) + 1;
constexpr auto kOffloaded = static_cast<std::size_t>(base::MemoryCategory::offloaded);

/// The index of `name`, which is added if it is new.
std::size_t index_in(std::vector<std::string>& names, const std::string& name) {
  const auto found = std::ranges::find(names, name);
  const auto index = static_cast<std::size_t>(found - names.begin());
  if (found == names.end()) names.push_back(name);
  return index;
}

ordered_json memory_json(const std::vector<MemorySample>& memory) {
  ordered_json all = ordered_json::array();
  for (const MemorySample& sample : memory) {
    ordered_json row = {sample.at_ns};
    for (const std::int64_t bytes : sample.bytes) row.push_back(bytes);
    all.push_back(std::move(row));
  }
  return all;
}

ordered_json rank_json(const RankTimeline& rank, std::vector<std::string>& units) {
  ordered_json events = ordered_json::array();
  for (const TraceEvent& e : rank.events)
    events.push_back({static_cast<int>(e.kind), index_in(units, e.unit), e.start_ns, e.duration_ns(), e.bytes});
  ordered_json json = {{"rank", rank.rank}, {"events", events}, {"memory", memory_json(rank.memory)}};
  for (const auto& [t, started_by] : rank.transfers)
    json["transfers"].push_back({t.operation, t.axis, t.bytes, t.called_ns, t.begun_ns, t.done_ns, started_by});
  return json;
}

RankTimeline parse_rank(const JsonReader& in, const std::vector<std::string>& units) {
  RankTimeline rank{.rank = static_cast<int>(in.at("rank").integer(0, std::numeric_limits<int>::max()))};
  for (const JsonReader& e : in.at("events").elements()) {
    const auto kind = static_cast<TraceEventKind>(e.at(0).integer(0, kEventKinds - 1));
    const auto unit = static_cast<std::size_t>(e.at(1).integer(0, std::ssize(units) - 1));
    const std::int64_t start = e.at(2);
    rank.events.push_back({kind, units[unit], rank.rank, e.at(4), start, start + e.at(3).integer(0)});
  }
  if (in.has("transfers"))
    for (const JsonReader& t : in.at("transfers").elements())
      rank.transfers.push_back({{t.at(0), t.at(1), rank.rank, t.at(2), t.at(3), t.at(4), t.at(5)},
                                static_cast<std::size_t>(t.at(6).integer(0, std::ssize(rank.events) - 1))});
  for (const JsonReader& row : in.at("memory").elements()) {
    MemorySample& sample = rank.memory.emplace_back();
    sample.at_ns = row.at(0);
    for (std::size_t i = 0; i < base::kMemoryUses; ++i) sample.bytes[i] = row.at(i + 1).integer(0);
  }
  return rank;
}

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

std::int64_t MemorySample::total() const {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    if (i != kOffloaded) sum += bytes[i];
  return sum;
}

std::int64_t covered_ns(std::vector<std::pair<std::int64_t, std::int64_t>> spans) {
  std::ranges::sort(spans);
  std::int64_t sum = 0, end = std::numeric_limits<std::int64_t>::min();
  for (const auto& [from, to] : spans) {
    if (to > end) sum += to - std::max(from, end);
    end = std::max(end, to);
  }
  return sum;
}

std::vector<MemorySample> samples_of(const base::MemoryHistory& history, std::int64_t begin_ns, std::size_t most) {
  std::vector<MemorySample> all = {{0, history.before}};
  for (const base::MemoryChange& change : history.changes) {
    MemorySample next = all.back();
    next.at_ns = change.at_ns - begin_ns;
    next.bytes[static_cast<std::size_t>(change.use)] += change.bytes;
    if (next.at_ns <= 0)
      all.back() = {0, next.bytes};  // made before the step
    else
      all.push_back(next);
  }
  // Of each group of neighbors the highest stays, and the last of all.
  const std::size_t group = (all.size() + most - 1) / most;
  if (group <= 1) return all;
  std::vector<MemorySample> kept;
  for (std::size_t i = 0; i < all.size(); i += group) {
    const auto end = all.begin() + static_cast<std::ptrdiff_t>(std::min(all.size(), i + group));
    kept.push_back(
        *std::ranges::max_element(all.begin() + static_cast<std::ptrdiff_t>(i), end, {}, &MemorySample::total));
  }
  if (kept.back().at_ns != all.back().at_ns) kept.push_back(all.back());
  return kept;
}

std::string chrome_trace(std::span<const TraceEvent> events, std::span<const base::TransferEvent> transfers) {
  std::ostringstream text;
  base::write_chrome_trace(text, events, transfers);
  return text.str();
}

ordered_json to_json(const StepTimeline& timeline) {
  std::vector<std::string> units;
  ordered_json ranks = ordered_json::array();
  for (const RankTimeline& rank : timeline.ranks) ranks.push_back(rank_json(rank, units));
  ordered_json kinds = ordered_json::array();
  for (std::size_t i = 0; i < kEventKinds; ++i) kinds.push_back(base::name_of(static_cast<TraceEventKind>(i)));
  ordered_json memory = ordered_json::array();
  for (std::size_t i = 0; i < base::kMemoryUses; ++i)
    memory.push_back(base::name_of(static_cast<base::MemoryCategory>(i)));
  return {{"step", timeline.step},
          {"length_ns", timeline.length_ns},
          {"simulated", timeline.simulated},
          {"one_clock", timeline.one_clock},
          {"pieces", timeline.pieces},
          {"predicted_state", timeline.predicted_state},
          {"event_kinds", kinds},
          {"memory_kinds", memory},
          {"units", units},
          {"ranks", ranks}};
}

StepTimeline parse_timeline(const JsonReader& json) {
  StepTimeline timeline{.step = json.at("step").integer(0),
                        .length_ns = json.at("length_ns").integer(0),
                        .simulated = json.at("simulated"),
                        .one_clock = json.at("one_clock"),
                        .pieces = json.at("pieces"),
                        .predicted_state = json.at("predicted_state")};
  for (std::size_t i = 0; i < timeline.pieces.size(); ++i) json.at("pieces").at(i).integer(1);
  const std::vector<std::string> units = json.at("units");
  for (const JsonReader& rank : json.at("ranks").elements()) timeline.ranks.push_back(parse_rank(rank, units));
  return timeline;
}

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

ordered_json to_json(const StepParts& parts) {
  ordered_json json;
  for (const auto& [name, part] : kStepParts) json[name] = parts.*part;
  return json;
}

StepParts parse_step_parts(const JsonReader& json) {
  StepParts parts;
  for (const auto& [name, part] : kStepParts) parts.*part = json.at(name);
  return parts;
}

}  // namespace tessera::tools
