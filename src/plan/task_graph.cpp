#include "tessera/plan/task_graph.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <queue>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::plan {

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

}  // namespace tessera::plan
