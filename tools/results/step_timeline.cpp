#include "tools/results/step_timeline.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <sstream>

namespace tessera::tools {
namespace {

using base::JsonReader;
using nlohmann::ordered_json;

constexpr std::size_t kEventKinds = static_cast<std::size_t>(base::TraceEventKind::optimizer_step) + 1;
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
  for (const base::TraceEvent& e : rank.events)
    events.push_back({static_cast<int>(e.kind), index_in(units, e.unit), e.start_ns, e.duration_ns(), e.bytes});
  ordered_json json = {{"rank", rank.rank}, {"events", events}, {"memory", memory_json(rank.memory)}};
  for (const auto& [t, started_by] : rank.transfers)
    json["transfers"].push_back({t.operation, t.axis, t.bytes, t.called_ns, t.begun_ns, t.done_ns, started_by});
  return json;
}

RankTimeline parse_rank(const JsonReader& in, const std::vector<std::string>& units) {
  RankTimeline rank{.rank = static_cast<int>(in.at("rank").integer(0, std::numeric_limits<int>::max()))};
  for (const JsonReader& e : in.at("events").elements()) {
    const auto kind = static_cast<base::TraceEventKind>(e.at(0).integer(0, kEventKinds - 1));
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

}  // namespace

std::int64_t MemorySample::total() const {
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i)
    if (i != kOffloaded) sum += bytes[i];
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
    kept.push_back(*std::max_element(all.begin() + static_cast<std::ptrdiff_t>(i), end,
                                     [](const auto& a, const auto& b) { return a.total() < b.total(); }));
  }
  if (kept.back().at_ns != all.back().at_ns) kept.push_back(all.back());
  return kept;
}

std::string chrome_trace(std::span<const base::TraceEvent> events, std::span<const base::TransferEvent> transfers) {
  std::ostringstream text;
  base::write_chrome_trace(text, events, transfers);
  return text.str();
}

ordered_json to_json(const StepTimeline& timeline) {
  std::vector<std::string> units;
  ordered_json ranks = ordered_json::array();
  for (const RankTimeline& rank : timeline.ranks) ranks.push_back(rank_json(rank, units));
  ordered_json kinds = ordered_json::array();
  for (std::size_t i = 0; i < kEventKinds; ++i) kinds.push_back(base::name_of(static_cast<base::TraceEventKind>(i)));
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

}  // namespace tessera::tools
