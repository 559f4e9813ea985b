#include "tessera/plan/task_graph.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/plan/step_graph.h"

namespace tessera::plan {
namespace {

constexpr std::uint32_t kNoChain = UINT32_MAX;
constexpr std::size_t kMaxChains = 64;  // bounds the memory; nodes of further chains stay as dependencies

/// Adds nodes in order and knows which of them follow from which. The nodes are divided into chains, in which each node
/// waits for the one before, so that one number per chain says which nodes precede a node.
class NodeOrder {
 public:
  /// Sorts `nodes` and removes repeated ones and those that precede another one.
  void reduce(std::vector<std::uint32_t>& nodes) const {
    std::ranges::sort(nodes, std::greater<>());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    std::vector<std::uint32_t> kept;
    for (const std::uint32_t node : nodes)
      if (std::ranges::none_of(kept, [&](std::uint32_t later) { return precedes(node, later); })) kept.push_back(node);
    nodes.assign(kept.rbegin(), kept.rend());
  }

  /// The next node. Chains consist of work only or of operations only.
  void add(const std::vector<std::uint32_t>& after, bool operation) {
    const auto node = static_cast<std::uint32_t>(places_.size());
    std::vector<std::uint32_t> reached;
    for (const std::uint32_t earlier : after) {
      const std::vector<std::uint32_t>& more = reached_[earlier];
      if (reached.size() < more.size()) reached.resize(more.size(), 0);
      for (std::size_t i = 0; i < more.size(); ++i) reached[i] = std::max(reached[i], more[i]);
    }
    const Place place = next_place(after, operation);
    if (place.chain != kNoChain) {
      chains_[place.chain] = {node, place.position, operation};
      if (reached.size() <= place.chain) reached.resize(place.chain + 1, 0);
      reached[place.chain] = place.position;
    }
    places_.push_back(place);
    reached_.push_back(std::move(reached));
  }

 private:
  struct Place {
    std::uint32_t chain = kNoChain;
    std::uint32_t position = 0;  // from 1
  };
  struct Chain {
    std::uint32_t last = 0;  // node
    std::uint32_t length = 0;
    bool operations = false;
  };

  Place next_place(const std::vector<std::uint32_t>& after, bool operation) {
    for (const std::uint32_t earlier : after) {
      const std::uint32_t chain = places_[earlier].chain;
      if (chain != kNoChain && chains_[chain].last == earlier && chains_[chain].operations == operation)
        return {chain, chains_[chain].length + 1};
    }
    if (chains_.size() == kMaxChains) return {};
    chains_.emplace_back();
    return {static_cast<std::uint32_t>(chains_.size() - 1), 1};
  }
  bool precedes(std::uint32_t node, std::uint32_t later) const {
    const Place& place = places_[node];
    return place.chain < reached_[later].size() && reached_[later][place.chain] >= place.position;
  }

  std::vector<Chain> chains_;
  std::vector<Place> places_;                        // by node
  std::vector<std::vector<std::uint32_t>> reached_;  // by node and chain: positions up to this one precede it
};

}  // namespace

std::int64_t later(std::int64_t start, double ns) {
  constexpr auto kMost = static_cast<double>(INT64_MAX / 2);
  const double end = static_cast<double>(start) + ns;
  if (!(end <= kMost))
    throw base::InvalidUsage(
        "simulation: a step takes longer than 146 years; check the rates and latencies of the machine and of the "
        "links");
  return start + std::llround(ns);
}

TransferModel::~TransferModel() = default;

TaskGraph::TaskGraph() { tasks_.emplace_back(); }

TaskId TaskGraph::append(const Task& task, std::span<const TaskId> after) {
  const auto id = static_cast<TaskId>(tasks_.size());
  tasks_.push_back(task);
  tasks_.back().first_dependency = static_cast<std::uint32_t>(dependencies_.size());
  for (const TaskId earlier : after) {
    if (earlier >= id) throw base::InvalidUsage("task graph: a task can wait for earlier tasks only");
    const auto mine = dependencies_.begin() + tasks_.back().first_dependency;
    if (std::find(mine, dependencies_.end(), earlier) == dependencies_.end()) dependencies_.push_back(earlier);
  }
  tasks_.back().dependencies = static_cast<std::uint32_t>(dependencies_.size()) - tasks_.back().first_dependency;
  return id;
}

TaskId TaskGraph::add_work(std::int64_t duration_ns, std::span<const TaskId> after, std::string_view label) {
  if (duration_ns < 0) throw base::InvalidUsage("task graph: a task can't take " + std::to_string(duration_ns) + " ns");
  return append({.duration_ns = duration_ns, .label = label}, after);
}

TaskId TaskGraph::add_transfer(std::uint32_t transfer, std::span<const TaskId> after, std::string_view label) {
  return append({.transfer = transfer, .label = label}, after);
}

TaskId TaskGraph::join(TaskId a, TaskId b) {
  const auto [earlier, later] = std::minmax(a, b);
  if (earlier == later || earlier == 0) return later;
  const std::span<const TaskId> known = dependencies(tasks_.at(later));
  if (std::ranges::find(known, earlier) != known.end()) return later;
  return add_work(0, std::vector<TaskId>{a, b});
}

namespace {

/// Runs the tasks of a graph in the order of simulated time.
class TaskSolver {
 public:
  TaskSolver(const TaskGraph& graph, TransferModel* transfers)
      : graph_(graph), transfers_(transfers), times_(graph.tasks().size()), open_(graph.tasks().size()) {}

  std::vector<TaskGraph::Times> solve() {
    if (transfers_ != nullptr) transfers_->reset();
    index_dependents();
    std::int64_t now = 0;
    for (TaskId id = 0; id < open_.size(); ++id)
      if (open_[id] == 0) start(id, now);
    while (true) {
      const std::int64_t work_end = running_.empty() ? INT64_MAX : running_.top().first;
      const std::int64_t transfer_end = transfers_ == nullptr ? INT64_MAX : transfers_->next_end();
      now = std::min(work_end, transfer_end);
      if (now == INT64_MAX) return std::move(times_);
      if (work_end <= transfer_end) {
        const TaskId id = running_.top().second;
        running_.pop();
        finish(id, now);
      } else {
        const std::uint32_t transfer = transfers_->finish(now);
        if (transfer != TaskGraph::kNoTransfer) finish(task_of_.at(transfer), now);
      }
    }
  }

 private:
  void index_dependents() {
    const std::vector<TaskGraph::Task>& tasks = graph_.tasks();
    first_.assign(tasks.size() + 1, 0);
    for (TaskId id = 0; id < tasks.size(); ++id) {
      open_[id] = tasks[id].dependencies;
      for (const TaskId earlier : graph_.dependencies(tasks[id])) ++first_[earlier + 1];
      if (tasks[id].transfer == TaskGraph::kNoTransfer) continue;
      if (transfers_ == nullptr)
        throw base::InvalidUsage("task graph: it has transfers, but there is no model of them");
      if (task_of_.size() <= tasks[id].transfer) task_of_.resize(tasks[id].transfer + 1, 0);
      task_of_[tasks[id].transfer] = id;
    }
    for (std::size_t i = 1; i < first_.size(); ++i) first_[i] += first_[i - 1];
    dependents_.resize(first_.back());
    std::vector<std::uint32_t> filled(first_.begin(), first_.end() - 1);
    for (TaskId id = 0; id < tasks.size(); ++id)
      for (const TaskId earlier : graph_.dependencies(tasks[id])) dependents_[filled[earlier]++] = id;
  }
  void start(TaskId id, std::int64_t now) {
    const TaskGraph::Task& task = graph_.tasks()[id];
    times_[id].begin_ns = now;
    if (task.transfer == TaskGraph::kNoTransfer)
      running_.emplace(later(now, static_cast<double>(task.duration_ns)), id);
    else
      transfers_->start(task.transfer, now);
  }
  void finish(TaskId id, std::int64_t now) {
    times_[id].end_ns = now;
    for (std::uint32_t i = first_[id]; i < first_[id + 1]; ++i)
      if (--open_[dependents_[i]] == 0) start(dependents_[i], now);
  }

  using Running = std::pair<std::int64_t, TaskId>;  // end, task
  const TaskGraph& graph_;
  TransferModel* const transfers_;
  std::vector<TaskGraph::Times> times_;
  std::vector<std::uint32_t> open_;  // dependencies that are not done, by task
  std::vector<std::uint32_t> first_;
  std::vector<TaskId> dependents_;
  std::vector<TaskId> task_of_;  // by transfer
  std::priority_queue<Running, std::vector<Running>, std::greater<>> running_;
};

}  // namespace

std::vector<TaskGraph::Times> TaskGraph::solve(TransferModel* transfers) const {
  return TaskSolver(*this, transfers).solve();
}

StepGraph step_graph(const VirtualClock& clock, const StepTasks& tasks, std::span<const TransferRecord> transfers,
                     const KernelSimulator& kernels) {
  const TaskGraph& graph = clock.graph();
  const std::int64_t origin = clock.times_of(tasks.origin).end_ns;
  StepGraph nodes;
  NodeOrder order;
  std::vector<std::vector<std::uint32_t>> nodes_of(tasks.end - tasks.first);  // by task: what is done when it is done
  for (TaskId id = tasks.first; id < tasks.end; ++id) {
    const TaskGraph::Task& task = graph.tasks()[id];
    std::vector<std::uint32_t> after;
    for (const TaskId earlier : graph.dependencies(task)) {
      if (earlier < tasks.first) continue;
      const std::vector<std::uint32_t>& waited = nodes_of[earlier - tasks.first];
      after.insert(after.end(), waited.begin(), waited.end());
    }
    order.reduce(after);
    const bool operation = task.transfer != TaskGraph::kNoTransfer;
    if (!operation && task.duration_ns == 0 && task.label.empty()) {
      nodes_of[id - tasks.first] = std::move(after);
      continue;
    }
    order.add(after, operation);
    const TaskGraph::Times times = clock.times_of(id);
    nodes_of[id - tasks.first] = {static_cast<std::uint32_t>(nodes.size())};
    StepNode& node = nodes.emplace_back();
    node.label = task.label;
    node.start_ns = std::max(times.begin_ns, origin) - origin;
    node.duration_ns = std::max(times.end_ns, origin) - origin - node.start_ns;
    node.after = std::move(after);
    if (operation) node.operation = transfers[task.transfer].operation;
    if (const auto call = kernels.calls().find(id); call != kernels.calls().end()) node.kernel = call->second;
    node.task = id;
  }
  return nodes;
}

}  // namespace tessera::plan
