// What the parts of an engine share.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/fsdp/engine/engine_resources.h"
#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/fsdp/engine/grad_norm.h"
#include "tessera/fsdp/engine/grad_reducer.h"
#include "tessera/fsdp/engine/group_state.h"
#include "tessera/fsdp/engine/module_buffers.h"
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

/// One per engine; used by its thread.
struct EngineCore {
  /// Checks the options, divides the model into units and allocates their state. Collective. `the_model` and `world`
  /// outlive it. Throws as Engine's constructor does.
  EngineCore(Model& the_model, comm::Communicator& world, EngineOptions the_options);
  ~EngineCore();

  Model& model;
  const EngineOptions options;  ///< with a mesh
  EngineResources resources;
  std::vector<std::unique_ptr<UnitRuntime>> units;  ///< in forward order
  std::unique_ptr<ModuleBuffers> buffers;
  std::unique_ptr<ExecOrderValidator> order;
  std::unique_ptr<GradNorm> norm;     ///< null unless options.measures_norm()
  std::uint64_t steps = 0;            ///< made, including skipped ones
  std::uint64_t skipped_steps = 0;    ///< that changed nothing
  bool replicas_apart = false;        ///< replicas have made steps since the last sync
  bool order_exchange_begun = false;  ///< for this step
  bool libraries_compared = false;    ///< and a difference is logged

  /// Steps between replica syncs; 1 without a sync period.
  std::uint64_t sync_period() const;
  /// Creates the collective plug-ins for the units' layout; drops the state of former ones.
  void create_collectives();
  void clear_plugin_state();
  void reserve_offload_chunks();
  /// Makes the compute stream wait for what the last step left in flight.
  void join_step();
  /// Waits, a bounded time, until operations in flight have ended and the device has done its work. Aborts the
  /// communicators if that takes long: other ranks may never call those operations. Throws what ended them.
  void drain_after_exception();
  /// Called before values are written: orders the writes after what the last step left in flight.
  void begin_writing_values();
  /// Orders the next gather after what was written to parameters on the compute stream.
  void publish_values();

  /// Before a step's first gather: sends the previous step's execution order to the other ranks.
  void exchange_order();
  /// Between two steps: waits until all ranks have called it with the same text.
  void agree(const std::string& what);
  /// As ExecOrderValidator::agree(). On a mismatch, aborts all communicators: other ranks may be waiting for this rank
  /// on any of them, and so receive the cause.
  void agree_on_order(const std::string& next);
  /// Collective: logs on rank 0 if the ranks' libraries, which may round differently, are not the same.
  void compare_libraries();

 private:
  /// Checked options, and the units into which the model is divided.
  struct Setup {
    EngineOptions options;
    std::vector<UnitSpec> specs;
    std::vector<std::optional<Strategy>> own;  ///< strategies of single units, by spec
    std::unique_ptr<ExecOrderValidator> order;
  };
  static Setup checked(Model& model, EngineOptions options, int ranks);
  /// Collective: throws Mismatch on all ranks, with the values and their ranks, if what all must have alike differs.
  static Setup alike(Model& model, comm::Communicator& world, Setup setup);
  EngineCore(Model& the_model, comm::Communicator& world, Setup setup);
  void add_unit(UnitSpec spec, std::optional<Strategy> own);
  void mark_kept_units();
  template <class Check>
  void abort_on_mismatch(Check&& check);
  void abort_channels(const std::string& reason) noexcept;
};

}  // namespace tessera::fsdp
