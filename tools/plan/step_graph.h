// The work and the operations of one simulated step, each with those that it waits for.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/base/virtual_clock.h"
#include "tessera/comm/sim/world.h"
#include "tessera/nn/kernel_interceptor.h"

namespace tessera::tools {

/// Work, or an operation of a communicator.
struct StepNode {
  std::string_view label;     ///< a literal: the kernel or the operation
  std::int64_t start_ns = 0;  ///< when all that it waits for is done, since the begin of the step
  /// Within the step: a gather may start while the previous one ends. Of an operation, with the wait for its links.
  std::int64_t duration_ns = 0;
  std::vector<std::uint32_t> after;                 ///< earlier nodes, without those that others of `after` imply
  std::optional<comm::sim::SimulatedOp> operation;  ///< nothing for work
  std::optional<nn::KernelInvocation> kernel;       ///< of work: the call, if it is one of a kernel
  base::TaskId task = 0;                            ///< in the clock's graph
};

/// In an order in which each node follows those that it waits for.
using StepGraph = std::vector<StepNode>;

/// Which tasks of a clock's graph become a StepGraph.
struct StepTasks {
  base::TaskId origin = 0;  ///< time 0 of the graph is when it is done
  base::TaskId first = 0;
  base::TaskId end = 0;  ///< after the last one
};

/// Simulates kernels, and keeps the calls by task.
class KernelRecorder final : public nn::KernelInterceptor {
 public:
  /// `clock` outlives it.
  KernelRecorder(base::VirtualClock& clock, const nn::KernelTime& time) : clock_(clock), simulator_(clock, time) {}
  void call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) override;
  const std::map<base::TaskId, nn::KernelInvocation>& calls() const { return calls_; }

 private:
  base::VirtualClock& clock_;
  nn::KernelSimulator simulator_;
  std::map<base::TaskId, nn::KernelInvocation> calls_;
};

/// Tasks that only join others are resolved into dependencies. `transfers` are those of the clock's graph.
StepGraph step_graph(const base::VirtualClock& clock, const StepTasks& tasks,
                     std::span<const comm::sim::TransferRecord> transfers, const KernelRecorder& kernels);

/// As plan --json has it (docs/plan.md).
nlohmann::ordered_json to_json(const StepGraph& graph);

}  // namespace tessera::tools
