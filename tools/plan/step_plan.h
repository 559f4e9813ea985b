// One step of a training run on a simulated cluster, and the same without its times.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/memory_tracker.h"
#include "tessera/base/trace.h"
#include "tessera/plan/all_ranks.h"
#include "tessera/plan/simulation.h"
#include "tessera/plan/step_graph.h"
#include "tessera/plan/world.h"
#include "tools/plan/cluster_file.h"
#include "tools/results/run_result.h"
#include "tools/train/plan.h"

namespace tessera::tools {

/// The simulated step of the last rank; all ranks are equal.
struct StepPlan {
  RunResult result;                      ///< without losses and hash; model state and peaks are those of this rank
  std::optional<double> mfu;             ///< nothing if the peak of the machine is not known for the precision
  std::vector<base::TraceEvent> events;  ///< of the step
  std::vector<plan::TransferRecord> transfers;  ///< called in the step
  std::vector<plan::TransferRecord> in_flight;  ///< called in the step before, and not done when the step begins
  fsdp::MeshShape mesh;                         ///< as the engine uses it
  std::vector<fsdp::UnitSize> unit_sizes;       ///< input of the formulas
  std::int64_t begin_ns = 0;                    ///< of the step, on the clock of `events` and `transfers`
  std::int64_t end_ns = 0;                      ///< likewise, without the overhead of the cluster
  plan::StepGraph graph;                        ///< empty unless asked for
  std::uint32_t first_node = 0;                 ///< of the step, in `graph`
  std::int64_t graph_begin_ns = 0;              ///< time 0 of `graph`, on the clock of `events`
  base::MemoryHistory memory;                   ///< of the whole simulation, in its order; empty unless asked for
  base::MemoryHistory step_memory;              ///< of the step, on the clock of `events`; empty unless asked for
  std::vector<double> rank_step_ms;             ///< of every rank, if they differ; empty: they are equal
};

/// What StepPlan holds only if it is asked for.
struct StepDetails {
  /// The step begins when the one before is done, and ends when all that it issued is done. False: steps follow each
  /// other as in training, so that all-gathers of updated parameters hide behind the next forward.
  bool isolated = false;
  bool graph = false;        ///< of an isolated step; else of the step and the one before
  bool all_memory = false;   ///< StepPlan::memory; not with step_memory
  bool step_memory = false;  ///< StepPlan::step_memory; of an isolated step
};

/// A step of one rank of `plan`: to be simulated, or to be measured.
plan::TrainingStep training_step(const TrainPlan& plan, const fsdp::EngineOptions& engine);

/// Simulates a step of `plan` under `strategy`, or one sync period for a strategy that has one: times are then means
/// over its steps. Throws InvalidUsage if the strategy can't run on this world.
/// `variation`: how ranks differ; the step is then that of the slowest, and events and exposed time are those of a rank
/// among equal ones.
StepPlan plan_step(const TrainPlan& plan, const std::string& strategy, const SimulatedCluster& cluster,
                   const std::optional<plan::Variation>& variation = {}, StepDetails details = {});

/// The transfers of the step, in the order of StepPlan::transfers.
std::vector<base::TransferEvent> transfer_events(const StepPlan& plan);

/// A figure for a microbatch of the fewest and of the most sequences. It grows in proportion to the sequences between.
using Growth = std::array<std::int64_t, 2>;

struct StepAction {
  enum class Kind : std::uint8_t {
    compute,       ///< StepSchedule::works[index]
    call,          ///< StepSchedule::operations[index]
    wait,          ///< for the operation that was called as number `index`; counts as exposed
    wait_unshown,  ///< likewise, without being counted: of norms, for example
  };
  Kind kind = Kind::compute;
  std::uint32_t index = 0;
};

/// A simulated step without its times: what a rank computes, calls and waits for, in an order that no link and no batch
/// changes. So it can be timed again over other links and for other batches, which the pages do.
struct StepSchedule {
  std::vector<StepAction> actions;  ///< of the step before, and of the step
  std::uint32_t first = 0;          ///< action of the step: before it, all that was called may be in flight
  std::vector<Growth> works;        ///< nanoseconds
  std::vector<plan::SimulatedOp> operations;
  Growth work_in_waits{};      ///< nanoseconds that count as exposed, such as decoding
  std::vector<Growth> memory;  ///< live bytes at the instants that can be the peak
};

/// From the same continuous step with the fewest and with the most sequences, planned with their graphs for a machine
/// that does one thing at a time, over one link without latency that is so slow that waits take time. Nothing if their
/// orders differ.
std::optional<StepSchedule> schedule_of(const StepPlan& fewest, const StepPlan& most);

/// Whether the memory of a step between the two is, at every instant, what StepSchedule::memory says: `part` of the way
/// from the fewest to the most sequences.
bool grows_evenly(const StepPlan& fewest, const StepPlan& between, const StepPlan& most, double part);

/// What an operation needs of the ports of its rank: inside its host, and to other hosts.
struct PortLoad {
  std::array<double, 2> bytes{};  ///< that pass each
  std::array<int, 2> messages{};  ///< in a row, whose latencies follow
  bool operator==(const PortLoad&) const = default;
};

/// Nothing if the operation passes the ports in several rounds. `hosts` divides `ranks`.
std::optional<PortLoad> port_load(const plan::SimulatedOp& operation, int ranks, int hosts);

}  // namespace tessera::tools
