// The engine: trains any nn::Module under any strategy, by one code path.
//
//   fsdp::Engine engine(model, world, {.strategy = fsdp::strategy_named("fsdp")});
//   engine.initialize(seed);
//   for (...) {
//     nn::Tape tape;
//     nn::Tensor loss;
//     {
//       nn::TapeScope recording(context, &tape);
//       loss = model.loss(tokens, targets);     // hooks unshard each unit before it computes, and reshard it after
//     }
//     tape.backward(loss);                       // hooks unshard again, and reduce the gradients of each unit
//     engine.step(learning_rate);
//   }
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/trace.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/engine_options.h"
#include "tessera/fsdp/formulas.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/sharding_plan.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/module.h"
#include "tessera/nn/optimizer.h"

namespace tessera::fsdp {

struct EngineResources;
class ModuleBuffers;
class ExecOrderValidator;
class ParamGroup;

/// A range of a parameter, or of one of its optimizer states, that this rank holds.
struct ShardRange {
  const nn::Parameter& parameter;  ///< outlives the visitor's call
  int state = -1;                  ///< -1: the parameter's values
  nn::ElementRange range;          ///< in elements of the parameter
  DType dtype = DType::f32;        ///< of the elements at `data`; f32 for optimizer states
  const void* data = nullptr;      ///< the first element of `range`; in device memory unless `offloaded`
  bool offloaded = false;          ///< `data` is in host memory, and already written
};

/// The range of a parameter's gradient with which this rank updates; the whole gradient where the optimizer is
/// replicated.
struct GradientShard {
  const nn::Parameter& parameter;  ///< outlives the visitor's call
  nn::ElementRange range;          ///< in elements of the parameter
  DType dtype = DType::f32;        ///< of the elements at `data`
  void* data = nullptr;            ///< may be written, identically on every rank where the optimizer is replicated
  bool offloaded = false;          ///< `data` is in host memory
};

/// Calls and bytes sent by one rank, by kind; `control` holds norms and votes. Cumulative.
struct TESSERA_API EngineTraffic {
  comm::TrafficStats::TrafficCount all_gather,  ///< gathers of parameters
      reduce_scatter,                           ///< reductions to shards
      all_reduce,                               ///< reductions to full gradients, or of parameter deltas
      control;                                  ///< norms and votes
  comm::TrafficStats::TrafficCount broadcast;   ///< of module buffers
  /// The traffic between two calls of Engine::traffic(), the later one on the left.
  EngineTraffic operator-(const EngineTraffic& earlier) const;
};

/// One per rank and model; used by one thread. `model` and `world` outlive it. The constructor is collective; so are
/// step(), initialize(), for_each_parameter() and a forward or backward of the model. Every rank makes the same calls
/// in the same order.
class TESSERA_API Engine {
 public:
  /// Divides the model into units, allocates the sharded state and installs the hooks; initialize(), load() or
  /// restore() then sets the values. Throws InvalidUsage or Unsupported if the options do not fit model, world or
  /// device.
  Engine(nn::Module& model, comm::Communicator& world, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Sets initial values from the Init of parameters and buffers, each rank its own shard; clears the optimizer.
  void initialize(std::uint64_t seed);
  /// Selects parameters; empty: all.
  using ParameterFilter = std::function<bool(const nn::Parameter&)>;
  /// Writes elements `range` of a parameter to `out`, in host memory.
  using ParameterLoader = std::function<void(const nn::Parameter&, nn::ElementRange, float* out)>;
  /// Sets values from another source: `fill` is called for ranges of parameters and writes them to the host memory
  /// passed to it. Only parameters that are `wanted` (empty: all).
  void load(const ParameterLoader& fill, const ParameterFilter& wanted = {});

  /// As initialize(seed), but `own` fills the parameters that are `wanted`, in the ranges that this rank holds.
  void initialize(std::uint64_t seed, const ParameterLoader& own, const ParameterFilter& wanted);
  /// Sets all ranks to the values of rank `from`: `fill` is called on that rank only, for whole parameters; buffers are
  /// broadcast. Needs host memory for one unit.
  void broadcast_from(int from, const ParameterLoader& fill, const ParameterFilter& wanted = {});

  /// Call after parameters began or ceased to require a gradient: rebuilds the layout of the affected units without
  /// changing a value. The optimizer of a newly trained parameter starts here; a newly frozen parameter loses its
  /// optimizer state, and a half-precision one its master weights. Call between two steps. Collective: throws Mismatch
  /// where the ranks disagree.
  void apply_requires_grad();

  /// Visits this rank's gradients after the last backward and until step(), averaged over the ranks and still
  /// multiplied by loss_scale(). The data is in device memory, in the order of the compute stream. step() clips and
  /// uses what the visitor writes. Throws InvalidUsage without a last backward, Unsupported if the norm has been
  /// computed and the gradients are in host memory.
  void for_each_gradient(const std::function<void(const GradientShard&)>& visitor);

  /// Whether the following backwards are the last of their step. Before the last one, gradients accumulate as the
  /// strategy says (Sync::when); scale the loss to its share of the step, as in backward(loss, 1.0 / microbatches).
  void set_is_last_backward(bool last) { last_backward_ = last; }

  /// Call after the last backward: waits for the reductions, clips, updates, and submits the gathers that follow an
  /// update. Throws InvalidUsage if no last backward of the whole model came before.
  void step(double learning_rate);
  /// For strategies with a sync period: synchronizes the replicas now, as the engine does at the end of each period. No
  /// effect where they have just synchronized, or synchronize in every step. Collective.
  void sync_replicas();
  /// Makes the compute stream wait for the operations that step() left in flight; otherwise the next forward does. For
  /// measurements.
  void wait();
  /// Whether step() computes the gradient norm.
  bool measures_norm() const { return options_.clip_norm > 0 || options_.measure_norm || options_.use_loss_scaling; }
  /// Sets the factor by which gradients are too large from the next backward on, because the loss is; step() divides by
  /// it. Throws InvalidUsage without use_loss_scaling.
  void set_loss_scale(double scale);
  double loss_scale() const { return loss_scale_; }  ///< 1 by default
  /// The gradient norm of the last step, over all ranks, before clipping, and unscaled. Waits. Throws InvalidUsage
  /// unless one of clip_norm, measure_norm and use_loss_scaling is set.
  double grad_norm();
  std::uint64_t steps() const { return steps_; }  ///< steps made, including skipped ones

  /// Receives a parameter and all its values.
  using Visitor = std::function<void(const nn::Parameter& parameter, std::span<const float> values)>;
  /// Visits every full parameter, in byte order of the names, on every rank: of half-precision parameters the f32
  /// master weights, of encodings the bytes as numbers (load() and checkpoints do the same). The data is in host memory
  /// and valid during the call. Waits.
  void for_each_parameter(const Visitor& visitor);

  /// Visits the sharded state that this rank saves: 1/n of every parameter (its f32 master weights where they exist)
  /// and of the optimizer state. All ranks together cover each element exactly once. Ranges count a parameter's own
  /// elements. `data` is valid during the call; device data is in the order of the compute stream. Not collective.
  void for_each_shard(const std::function<void(const ShardRange&)>& visitor);
  /// As load(), for optimizer states: `state` counts from 0. Each rank sets every range that it holds.
  void load_optimizer_state(
      const std::function<void(const nn::Parameter&, int state, nn::ElementRange, float* out)>& fill,
      const ParameterFilter& wanted = {});
  /// Number of optimizer states per element of a trainable parameter.
  int states() const;
  /// The step after which training of a parameter began: 0, unless apply_requires_grad() unfroze it. Its optimizer
  /// counts from there.
  std::uint64_t trained_since(const nn::Parameter& parameter) const;
  /// For restore(): sets trained_since() of every parameter.
  void set_trained_since(const std::function<std::uint64_t(const nn::Parameter&)>& step);
  /// Sets the step counters as if `steps` steps had been made, of which `skipped` changed nothing: the next step has
  /// the following number. `apart` is replicas_apart() of the run that is resumed; without it, the replicas count as
  /// apart unless a sync period ends here.
  void set_steps(std::uint64_t steps, std::uint64_t skipped = 0, std::optional<bool> apart = std::nullopt);
  /// Under a strategy with a sync period: the replicas have made steps since the last sync.
  bool replicas_apart() const { return apart_; }
  /// The number of steps() that changed nothing; the optimizer does not count them.
  std::uint64_t skipped_steps() const { return skipped_steps_; }
  nn::Module& model() { return model_; }  ///< the model given to the constructor
  /// The parameters of all units.
  std::vector<std::shared_ptr<nn::Parameter>> parameters() const;
  /// The buffers of the whole model. The engine owns their memory; they are not sharded or reduced.
  const std::vector<std::shared_ptr<nn::ModuleBuffer>>& buffers() const;
  /// Sets buffers of this rank: `fill` writes a whole buffer to the host memory passed to it. Only buffers that are
  /// `wanted` (empty: all). Not collective.
  void fill_buffers(const std::function<void(const nn::ModuleBuffer&, void* out)>& fill,
                    const std::function<bool(const nn::ModuleBuffer&)>& wanted = {});

  /// Throws InvalidUsage, with the reason, unless forward and backward are the same work on one stream in every step.
  void require_graphable() const;
  /// Records that a graph replay has done what a last backward of the whole model does.
  void note_replayed() { gradients_ = Gradients::complete; }

  /// State that only this rank holds: f32, in device memory, in the order of the compute stream. It consists of the
  /// state of the collective plug-ins, named by collective, and with a sync period the replica's parameters and
  /// optimizer states. Not collective.
  std::vector<CollectivePlugin::State> plugin_state();
  /// Sets all plug-in state: `fill` writes the `count` values of each entry for this rank. Empty: resets it. Not
  /// collective.
  void load_plugin_state(const std::function<void(const CollectivePlugin::State&, int rank, float* out)>& fill);
  /// Counters of this rank for one collective.
  CollectiveStats collective_stats(comm::OpKind collective) const;

  /// Drops an incomplete step after an exception, and the state of the collective plug-ins. Parameters and optimizer
  /// are as before the step, buffers as its forward left them.
  void abort_step();

  /// A unit's share of the model, for reports.
  struct UnitStats {
    std::string name;                 ///< as in UnitSpec
    std::int64_t elements = 0;        ///< of the parameters
    std::int64_t padding = 0;         ///< alignment between parameters and at the end
    bool kept_after_forward = false;  ///< stays unsharded between forward and backward
    bool is_root = false;             ///< UnitSpec::is_root
    Strategy strategy;                ///< as applied to this unit
    std::size_t peak_bytes = 0;       ///< of its leases so far: unsharded parameters and gradients
  };
  std::vector<UnitStats> units() const;      ///< in forward order
  std::vector<UnitSize> unit_sizes() const;  ///< input of the formulas, in forward order
  /// The strategy of most units, as applied to the mesh.
  const Strategy& strategy() const { return options_.strategy; }
  const MeshShape& mesh() const;  ///< of all ranks of the world
  int rank() const;               ///< of this process or thread in the world
  EngineTraffic traffic() const;  ///< of this rank, since the engine was created
  /// Bytes that this engine's norms and order checks send per step, at most over ranks.
  std::uint64_t control_formula_bytes() const;
  /// Bytes that this rank sends per step, in one call, where buffers are rank 0's (EngineTraffic::broadcast).
  std::uint64_t buffer_formula_bytes() const;
  std::uint64_t copied_bytes() const;  ///< between buffers in device memory, in bytes; cumulative
  /// Bytes between this rank's device and its shards in host memory. Cumulative.
  OffloadBytes offload_bytes() const;
  TraceRecorder& recorder();  ///< the events of this rank

 private:
  void install_hooks();
  void pre_forward(std::size_t unit, nn::Phase phase);
  void post_forward(std::size_t unit, nn::Module& module, nn::Phase phase);
  void reshard_recomputed(std::size_t but);
  void pre_backward(std::size_t unit);
  void post_backward(std::size_t unit);
  void end_root_forward();
  void end_root_backward();
  void reduce(std::size_t unit);
  void continue_reductions();
  void finish_reductions();
  void reshard_after_backward(std::size_t unit);
  void prefetch(std::size_t unit, int direction, nn::Phase phase);
  bool gather_ahead(std::size_t unit, nn::Phase phase);
  void resolve_prefetch_order();
  void begin_step();
  void share_buffers(nn::Phase phase);
  void agree(const std::string& what);
  template <class Check>
  void abort_on_mismatch(Check&& check);
  bool may_gather_ahead(const ParamGroup& unit) const;
  void make_collectives();
  void prepare_collectives();
  void clear_plugin_state();
  /// Steps between replica syncs; 1 without a sync period.
  std::uint64_t period() const;
  void reserve_pieces();
  void prepare_norm();
  void add_unit(UnitSpec spec);
  void compute_norm();
  void mark_kept_units();
  /// Called before values are written: orders the writes after what the last step left in flight.
  void begin_values();
  /// Orders the next gather after what was written to parameters on the compute stream.
  void publish_values();

  nn::Module& model_;
  const EngineOptions options_;
  std::unique_ptr<EngineResources> fabric_;
  std::vector<std::unique_ptr<ParamGroup>> units_;  // in forward order
  std::vector<Strategy> strategies_;                // of units_
  struct UnitProgress {
    int uses = 0;             // forwards recorded on the tape whose backward has not ended
    std::size_t entered = 0;  // modules of the unit entered in this forward
    bool reduced = false;     // in this backward
    std::vector<TraceRecorder::Span> spans;
  };
  std::vector<UnitProgress> progress_;
  std::vector<std::vector<std::size_t>> ahead_forward_, ahead_backward_;  // by unit: the program's prefetch order
  std::unique_ptr<ModuleBuffers> buffers_;
  std::unique_ptr<ExecOrderValidator> order_;
  bool orders_agreed_ = false;           // the ranks have compared the first forward's order
  bool in_step_ = false;                 // something was gathered or reduced since the last step()
  bool buffers_shared_ = false;          // broadcast in this step
  bool norm_parts_stale_ = false;        // gradients may have been written since the partial norms were computed
  std::vector<std::size_t> reducing_;    // oldest first
  std::vector<std::size_t> recomputed_;  // recomputed units whose backward has not begun
  bool apart_ = false;                   // replicas have made steps since the last sync
  Buffer norm_parts_;  // f64: a slot per flat parameter and slice (1/n of it); zero in slots of other ranks
  Buffer norms_;       // f64: the slots' sums over the ranks, then the norm, then the clipping factor
  std::size_t norm_slots_ = 0;
  std::vector<ShardingPlan::AxisSlice> norm_cuts_;  // axes over which the partial norms are distributed
  std::uint64_t steps_ = 0;
  std::uint64_t skipped_steps_ = 0;
  double loss_scale_ = 1;
  bool last_backward_ = true;
  enum class Gradients : std::uint8_t { none, of_some, complete };  // of this step's microbatches
  Gradients gradients_ = Gradients::none;
};

}  // namespace tessera::fsdp
