// The work and the operations of one simulated step, each with those that it waits for.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/plan/kernel_costs.h"
#include "tessera/plan/virtual_clock.h"
#include "tessera/plan/world.h"

namespace tessera::plan {

/// Work, or an operation of a communicator.
struct StepNode {
  std::string_view label;     ///< a literal: the kernel or the operation
  std::int64_t start_ns = 0;  ///< when all that it waits for is done, since the begin of the step
  /// Time within the step: an all-gather may start while the previous one ends. Of an operation, with the wait for its
  /// links.
  std::int64_t duration_ns = 0;
  std::vector<std::uint32_t> after;            ///< earlier nodes, without those that others of `after` imply
  std::optional<SimulatedOp> operation;        ///< nothing for work
  std::optional<nn::KernelInvocation> kernel;  ///< kernel call of work, if it is one
  TaskId task = 0;                             ///< task in the clock's graph
};

/// The nodes, in an order in which each follows those that it waits for.
using StepGraph = std::vector<StepNode>;

/// The tasks of a clock's graph that become a StepGraph.
struct StepTasks {
  TaskId origin = 0;  ///< time 0 of the graph is when it is done
  TaskId first = 0;   ///< the first one
  TaskId end = 0;     ///< after the last one
};

/// Tasks that only join others are resolved into dependencies. `transfers` are those of the clock's graph.
TESSERA_API StepGraph step_graph(const VirtualClock& clock, const StepTasks& tasks,
                                 std::span<const TransferRecord> transfers, const KernelSimulator& kernels);

}  // namespace tessera::plan
