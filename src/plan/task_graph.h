// The work of a simulated machine as a directed acyclic graph: tasks, what each waits for, and when each runs.
//
// A simulated program adds its tasks in the order in which it issues them, without knowing when they run. So the times
// can depend on everything that shares a link at a time, whatever the order of issue, and one graph can be timed again
// on another network.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::plan {

/// `start` + `ns`, rounded to a whole number. Throws InvalidUsage where that is more than a simulation counts, 146
/// years of simulated time, and for NaN.
TESSERA_API std::int64_t later(std::int64_t start, double ns);

using TaskId = std::uint32_t;  ///< index in TaskGraph::tasks()

/// Determines how long the transfers of a simulated machine take. All times are nanoseconds. Calls come in the order of
/// simulated time: `now` never decreases until reset().
class TESSERA_API TransferModel {
 public:
  virtual ~TransferModel();
  virtual void reset() = 0;                                          ///< nothing is in flight; the time is 0
  virtual void start(std::uint32_t transfer, std::int64_t now) = 0;  ///< all that the transfer waits for is done
  /// When a transfer in flight, or a part of one, ends next. INT64_MAX if none is in flight.
  virtual std::int64_t next_end() = 0;
  /// Ends what is due at `now`, one transfer or part. Returns the transfer, or TaskGraph::kNoTransfer after a part.
  virtual std::uint32_t finish(std::int64_t now) = 0;
  virtual std::int64_t begun(std::uint32_t transfer) const = 0;  ///< when it first had its link
};

/// Tasks and their dependencies. Task 0 is the origin: it takes no time, and every graph has it.
class TESSERA_API TaskGraph {
 public:
  static constexpr std::uint32_t kNoTransfer = UINT32_MAX;  ///< Task::transfer of work

  /// One task. It begins when all its dependencies are done.
  struct Task {
    std::int64_t duration_ns = 0;          ///< duration of work; unused for transfers
    std::uint32_t transfer = kNoTransfer;  ///< number of the transfer for the TransferModel
    std::uint32_t first_dependency = 0;    ///< index in dependencies()
    std::uint32_t dependencies = 0;        ///< how many
    std::string_view label;                ///< what it does: a literal; empty for tasks that only join others
  };
  /// When a task ran.
  struct Times {
    std::int64_t begin_ns = 0;  ///< when all its dependencies were done
    std::int64_t end_ns = 0;    ///< when it was done
  };

  TaskGraph();

  /// Adds work and returns its task. `after` are earlier tasks of this graph. Throws InvalidUsage for a later one.
  TaskId add_work(std::int64_t duration_ns, std::span<const TaskId> after, std::string_view label = {});
  /// Adds a transfer, whose end the TransferModel determines, likewise.
  TaskId add_transfer(std::uint32_t transfer, std::span<const TaskId> after, std::string_view label = {});
  /// A task that is done when both are; one of them if that is known to be the later one.
  TaskId join(TaskId a, TaskId b);

  const std::vector<Task>& tasks() const { return tasks_; }  ///< tasks by TaskId
  /// What the task waits for.
  std::span<const TaskId> dependencies(const Task& task) const {
    return std::span(dependencies_).subspan(task.first_dependency, task.dependencies);
  }

  /// Times every task. `transfers` may be null if the graph has no transfer; else throws InvalidUsage.
  std::vector<Times> solve(TransferModel* transfers) const;

 private:
  TaskId append(const Task& task, std::span<const TaskId> after);
  std::vector<Task> tasks_;
  std::vector<TaskId> dependencies_;
};

}  // namespace tessera::plan
