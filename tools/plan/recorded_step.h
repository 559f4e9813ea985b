// A step of the engine, recorded once and timed again with other parameters of the machine.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tessera/base/task_graph.h"
#include "tessera/comm/sim/topology.h"
#include "tessera/comm/sim/world.h"
#include "tools/plan/framework_profile.h"
#include "tools/plan/workload.h"

namespace tessera::tools {

/// What is not known of a machine and its software before they were measured.
struct MachineParameters {
  double products = 0.87;   ///< efficiency of products, power limits included
  double memory = 1;        ///< speed of memory-bound kernels and attention, as a part of that of the profile
  double launch_s = 12e-6;  ///< host time of a kernel launch
  double overhead = 1;      ///< of a step, as a part of that of the framework
  double link = 0.80;       ///< part of the nominal rate between hosts that collectives reach
};

/// The engine's schedule of a workload's step. Movable.
class RecordedStep {
 public:
  /// Runs the engine on tensors without data. Throws InvalidUsage for what the engine can't run.
  explicit RecordedStep(Workload workload);
  const Workload& workload() const { return workload_; }

  /// Seconds of a step.
  double seconds(const MachineParameters& parameters) const;
  std::uint64_t peak_bytes() const { return peak_bytes_; }  ///< of the engine, which has no allocator's reserve

 private:
  struct Task {
    std::uint32_t first_dependency = 0, dependencies = 0;
    std::int32_t work = -1, operation = -1;  // indices; -1: none
    bool begins_microbatch = false;
  };
  class Timing;
  void record();
  void keep(const base::TaskGraph& graph, base::TaskId begin, base::TaskId end, const FrameworkProfile& profile,
            const std::map<base::TaskId, std::int32_t>& operations);
  std::int32_t number_of(const comm::sim::SimulatedOp& operation);

  Workload workload_;
  int recorded_microbatches_ = 1;
  std::uint64_t peak_bytes_ = 0;
  std::vector<Task> tasks_;
  std::vector<std::uint32_t> dependencies_;  // numbers of tasks + 1; 0: done when the step begins
  std::vector<KernelWork> work_;
  std::vector<comm::sim::SimulatedOp> operations_;  // different ones
};

/// The network of a workload whose links between hosts reach this part of their rate, as collectives see it.
comm::sim::Topology topology_of(const Workload& workload, double link);
/// Seconds of an operation that no other one slows down.
double operation_time(const comm::sim::Network& network, const comm::sim::SimulatedOp& operation);

}  // namespace tessera::tools
