#include "tools/plan/step_plan.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace tessera::tools {
namespace {

using plan::SimulatedOp;

bool same_operation(const SimulatedOp& a, const SimulatedOp& b) {
  return a.kind == b.kind && a.bytes == b.bytes && a.ranks == b.ranks && a.members == b.members;
}

/// The place of `item` in `all`, which gets it if it is new.
template <class Item, class Equal>
std::uint32_t place_in(std::vector<Item>& all, const Item& item, const Equal& equal) {
  const auto found = std::ranges::find_if(all, [&](const Item& other) { return equal(other, item); });
  if (found != all.end()) return static_cast<std::uint32_t>(found - all.begin());
  all.push_back(item);
  return static_cast<std::uint32_t>(all.size() - 1);
}

/// Follows the same order of actions in two plans of a step.
class ScheduleWriter {
 public:
  explicit ScheduleWriter(std::array<const StepPlan*, 2> plans)
      : plans_(plans), calls_(plans[0]->graph.size(), kNone) {}

  void wait_for(std::uint32_t node) {
    if (calls_[node] == kNone || waited_[calls_[node]]) return;  // work, which precedes what follows anyway
    waited_[calls_[node]] = true;
    flush();
    Growth ends{};
    for (std::size_t i = 0; i < ends.size(); ++i)
      ends[i] = std::max(now_[i], plans_[i]->graph[node].start_ns + plans_[i]->graph[node].duration_ns);
    const bool exposed = in_a_wait(now_[0], ends[0]);
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (exposed) exposed_[i] += ends[i] - now_[i];
      now_[i] = ends[i];
    }
    schedule.actions.push_back({exposed ? StepAction::Kind::wait : StepAction::Kind::wait_unshown, calls_[node]});
  }
  void call(std::uint32_t node, const SimulatedOp& operation) {
    flush();
    calls_[node] = static_cast<std::uint32_t>(waited_.size());
    waited_.push_back(false);
    schedule.actions.push_back({StepAction::Kind::call, place_in(schedule.operations, operation, same_operation)});
  }
  void compute(std::uint32_t node) {
    for (std::size_t i = 0; i < open_.size(); ++i) {
      open_[i] += plans_[i]->graph[node].duration_ns;
      now_[i] += plans_[i]->graph[node].duration_ns;
    }
  }
  /// What follows is of the step itself.
  void begin() {
    flush();
    exposed_ = {};
    schedule.first = static_cast<std::uint32_t>(schedule.actions.size());
  }
  void finish() {
    flush();
    for (std::size_t i = 0; i < plans_.size(); ++i)
      schedule.work_in_waits[i] = exposed_ns(plans_[i]->events) - exposed_[i];
  }

  StepSchedule schedule;

 private:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  void flush() {
    if (open_ == Growth{}) return;
    schedule.actions.push_back({StepAction::Kind::compute, place_in(schedule.works, open_, std::equal_to<>())});
    open_ = {};
  }
  bool in_a_wait(std::int64_t from, std::int64_t to) const {
    const std::int64_t begin = plans_[0]->graph_begin_ns;
    return std::ranges::any_of(plans_[0]->events, [&](const base::TraceEvent& event) {
      return is_wait(event) && event.start_ns <= begin + from && event.end_ns >= begin + to;
    });
  }

  const std::array<const StepPlan*, 2> plans_;
  std::vector<std::uint32_t> calls_;  // by node
  std::vector<bool> waited_;          // by call
  Growth now_{}, exposed_{};
  Growth open_{};  // work since the last action
};

/// Live bytes after each change, without `offloaded`.
std::vector<std::int64_t> live_bytes(const base::MemoryHistory& history) {
  std::vector<std::int64_t> live{std::accumulate(history.before.begin(), history.before.end() - 1, std::int64_t{0})};
  for (const base::MemoryChange& change : history.changes)
    live.push_back(live.back() + (change.use == base::MemoryCategory::offloaded ? 0 : change.bytes));
  return live;
}

/// Points of which none is below another one for both batches.
std::vector<Growth> possible_peaks(std::vector<Growth> all) {
  std::ranges::sort(all, std::greater<>());
  std::vector<Growth> kept;
  for (const Growth& point : all)
    if (kept.empty() || point[1] > kept.back()[1]) kept.push_back(point);
  return kept;
}

}  // namespace

std::optional<StepSchedule> schedule_of(const StepPlan& fewest, const StepPlan& most) {
  if (fewest.graph.size() != most.graph.size() || fewest.first_node != most.first_node ||
      fewest.memory.changes.size() != most.memory.changes.size())
    return std::nullopt;
  ScheduleWriter writer({&fewest, &most});
  for (std::uint32_t i = 0; i < fewest.graph.size(); ++i) {
    if (i == fewest.first_node) writer.begin();
    const plan::StepNode &node = fewest.graph[i], &other = most.graph[i];
    if (node.label != other.label || node.after != other.after) return std::nullopt;
    for (const std::uint32_t earlier : node.after) writer.wait_for(earlier);
    if (!node.operation) {
      writer.compute(i);
      continue;
    }
    if (!same_operation(*node.operation, *other.operation)) return std::nullopt;
    writer.call(i, *node.operation);
  }
  writer.finish();
  StepSchedule schedule = std::move(writer.schedule);
  const std::vector<std::int64_t> live = live_bytes(fewest.memory), more = live_bytes(most.memory);
  std::vector<Growth> instants;
  for (std::size_t i = 0; i < live.size(); ++i) instants.push_back({live[i], more[i]});
  schedule.memory = possible_peaks(std::move(instants));
  return schedule;
}

bool grows_evenly(const StepPlan& fewest, const StepPlan& between, const StepPlan& most, double part) {
  const std::vector<std::int64_t> few = live_bytes(fewest.memory), some = live_bytes(between.memory),
                                  many = live_bytes(most.memory);
  if (few.size() != some.size() || few.size() != many.size()) return false;
  for (std::size_t i = 0; i < few.size(); ++i) {
    const double expected = static_cast<double>(few[i]) + static_cast<double>(many[i] - few[i]) * part;
    if (std::abs(expected - static_cast<double>(some[i])) > 0.5) return false;
  }
  return true;
}

std::optional<PortLoad> port_load(const SimulatedOp& operation, int ranks, int hosts) {
  constexpr LinkSpec kNoLatency{0, 1e9}, kMicrosecond{1, 1e9};
  PortLoad load;
  for (const std::size_t port : {0, 1}) {
    const LinkSpec &inside = port == 0 ? kMicrosecond : kNoLatency, &between = port == 0 ? kNoLatency : kMicrosecond;
    const plan::OpCost cost =
        simulate(linked_cluster(between, inside, hosts, ranks, {1, 1}), ranks).network.cost(operation);
    if (cost.size() != 1) return std::nullopt;
    load.messages.at(port) = static_cast<int>(cost[0].latency.count() / 1000);
    const int ranks_of_host = ranks / hosts;  // whose bytes the host's link carries
    for (const plan::LinkLoad& link : cost[0].loads)
      load.bytes.at(link.link) = link.link == 0 ? link.bytes : link.bytes / ranks_of_host;
  }
  return load;
}

}  // namespace tessera::tools
