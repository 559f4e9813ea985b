// The run-time parts of a unit.
#pragma once

#include "tessera/fsdp/engine/grad_reducer.h"
#include "tessera/fsdp/engine/group_state.h"
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/fsdp/engine/replica_sync.h"
#include "tessera/fsdp/engine/sharded_optimizer.h"

namespace tessera::fsdp {

/// What the engine has for each unit. During a step only the UnitScheduler uses `group` and `reducer`.
struct TESSERA_API UnitRuntime {
  /// `resources` outlives the unit.
  UnitRuntime(EngineResources& resources, UnitSpec spec, Strategy own_strategy, ShardingPlan plan, int optimizer_slots);

  const std::string& name() const { return group.name(); }
  const ShardingPlan& plan() const { return group.plan(); }
  /// Rebuilds the layout. Values stay, and so does the optimizer state of parameters that remain trained. Newly trained
  /// parameters have an optimizer that begins after `steps` steps. Collective.
  void lay_out_again(std::uint64_t steps);
  /// Drops operations in flight, after an error.
  void reset();

  const Strategy strategy;  ///< as applied to this unit
  ParamGroup group;
  GradReducer reducer;
  ShardedOptimizer optimizer;
  ReplicaSync sync;
  GroupState state;
};

}  // namespace tessera::fsdp
