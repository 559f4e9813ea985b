// The engine: trains any nn::Module under any strategy, by one path.
//
//   fsdp::Engine engine(model, world, {.strategy = fsdp::strategy_named("fsdp")});
//   engine.initialize(seed);
//   for (...) {
//     nn::Tape tape;
//     nn::Tensor loss;
//     {
//       nn::TapeScope recording(context, &tape);
//       loss = model.loss(tokens, targets);     // hooks gather each unit before it computes, and reshard it after
//     }
//     tape.backward(loss);                       // hooks gather again, and reduce the gradients of each unit
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

/// A range of a parameter, or of one of the optimizer's states of it, that one rank holds.
struct ShardRange {
  const nn::Parameter& parameter;
  int state = -1;  ///< -1: the parameter's values
  nn::ElementRange range;
  DType dtype = DType::f32;
  const void* data = nullptr;
  bool offloaded = false;  ///< `data` is the host's, and written
};

/// A range of a parameter's gradient that this rank updates with, or of all where the optimizer is replicated.
struct GradientShard {
  const nn::Parameter& parameter;
  nn::ElementRange range;
  DType dtype = DType::f32;
  void* data = nullptr;  ///< may be written; where the optimizer is replicated alike on every rank
  bool offloaded = false;
};

/// What one rank called and sent, by kind; `control` holds norms and votes. Cumulative.
struct TESSERA_API EngineTraffic {
  comm::TrafficStats::TrafficCount all_gather, reduce_scatter, all_reduce, control;
  comm::TrafficStats::TrafficCount broadcast;  ///< of buffers
  EngineTraffic operator-(const EngineTraffic& earlier) const;
};

/// One per rank and model; used by one thread. `model` and `world` outlive it. Constructing it is collective; so are
/// step(), initialize(), for_each_parameter() and a forward or backward of the model. Every rank makes the same calls
/// in the same order.
class TESSERA_API Engine {
 public:
  Engine(nn::Module& model, comm::Communicator& world, EngineOptions options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Initial values from the parameters' and buffers' Init, each rank its own part; clears the optimizer.
  void initialize(std::uint64_t seed);
  /// Values from somewhere else: `fill` is called for ranges of parameters and writes them to the
  /// host memory that it is given. Only of the parameters that are `wanted` (empty: all).
  using ParameterFilter = std::function<bool(const nn::Parameter&)>;
  using ParameterLoader = std::function<void(const nn::Parameter&, nn::ElementRange, float* out)>;
  void load(const ParameterLoader& fill, const ParameterFilter& wanted = {});

  /// Initial values of the program's own for the parameters that it wants, ranges of them where they live; the others
  /// as above.
  void initialize(std::uint64_t seed, const ParameterLoader& own, const ParameterFilter& wanted);
  /// Values that rank `from` has: `fill` is called there only, for whole parameters; buffers get what they hold there.
  /// Needs memory of the host for a unit.
  void broadcast_from(int from, const ParameterLoader& fill, const ParameterFilter& wanted = {});

  /// After parameters began or ceased to require a gradient: lays out anew the units in which that is so, without
  /// changing a value. What is trained from now on has an optimizer that begins here; of what is frozen it is dropped,
  /// and of 16-bit parameters the masters. Between two steps; collective: throws Mismatch where the ranks don't agree.
  void apply_requires_grad();

  /// Gradients as they are after the last backward, averaged over the ranks (and as often too large as loss_scale()
  /// says), until step(). In memory of the device, in the order of its compute stream. What is written is what step()
  /// clips and uses. Throws InvalidUsage without a last backward, Unsupported where the norm has been formed and the
  /// gradients lie with the host.
  void for_each_gradient(const std::function<void(const GradientShard&)>& visitor);

  /// Whether the backwards from here on are the last of their step. Before it, gradients add up as the strategy says
  /// (Sync::when); give the loss a share of the step's, as in backward(loss, 1.0 / microbatches).
  void set_is_last_backward(bool last) { last_backward_ = last; }

  /// After the last backward: waits for the reductions, clips, updates, and starts what must be gathered again.
  /// Throws InvalidUsage where no last backward of the whole model came before.
  void step(double learning_rate);
  /// Where the strategy has a period: the replicas meet now, as they do by themselves at its end. No effect where they
  /// have just met, or meet in every step. Collective.
  void sync_replicas();
  /// Waits (on the compute stream) for what step() left in flight; otherwise the next forward does. For measuring.
  void wait();
  bool measures_norm() const { return options_.clip_norm > 0 || options_.measure_norm || options_.use_loss_scaling; }
  /// Gradients are this many times too large from the next backward on, since the loss is; step() divides them. Throws
  /// InvalidUsage without use_loss_scaling.
  void set_loss_scale(double scale);
  double loss_scale() const { return loss_scale_; }
  /// Of the last step, over all ranks, before clipping, and unscaled. Waits. Throws InvalidUsage unless one
  /// of clip_norm, measure_norm and use_loss_scaling is set.
  double grad_norm();
  std::uint64_t steps() const { return steps_; }

  /// Shows every parameter whole, in byte order of the names, on every rank; of 16-bit ones the f32 masters, of
  /// encodings the bytes, as numbers (so do fill() and checkpoints). The data is in host memory and valid during the
  /// call. Waits.
  using Visitor = std::function<void(const nn::Parameter& parameter, std::span<const float> values)>;
  void for_each_parameter(const Visitor& visitor);

  /// This rank's share of what is saved: an n-th of every parameter (its f32 master where there is one) and of the
  /// optimizer's state, so that all ranks' shares are the whole, each element once. Ranges are of the parameter's own
  /// elements; `data` is valid during the call, the device's in the order of the compute stream. Not collective.
  void for_each_shard(const std::function<void(const ShardRange&)>& visitor);
  /// As fill(), of the optimizer's states: `state` counts from 0. Every rank sets all that it holds.
  void load_optimizer_state(
      const std::function<void(const nn::Parameter&, int state, nn::ElementRange, float* out)>& fill,
      const ParameterFilter& wanted = {});
  /// How many there are for each element of a trainable parameter.
  int states() const;
  /// The step after which a parameter began to be trained: 0, unless refresh() unfroze it. Its optimizer counts from
  /// there.
  std::uint64_t trained_since(const nn::Parameter& parameter) const;
  void set_trained_since(const std::function<std::uint64_t(const nn::Parameter&)>& step);
  /// As if so many steps had been done, of which some changed nothing: the next one is the number after.
  /// `apart`: replicas_apart() of the run that is resumed; without it they are apart unless a period ends here.
  void set_steps(std::uint64_t steps, std::uint64_t skipped = 0, std::optional<bool> apart = std::nullopt);
  /// Under a strategy with a period: the replicas have done steps since their last sync.
  bool replicas_apart() const { return apart_; }
  /// Of steps(): those that changed nothing; the optimizer doesn't count them.
  std::uint64_t skipped_steps() const { return skipped_steps_; }
  nn::Module& model() { return model_; }
  /// Those of all units.
  std::vector<std::shared_ptr<nn::Parameter>> parameters() const;
  /// Of the whole model. Their memory is the engine's; nothing of them is sharded or reduced.
  const std::vector<std::shared_ptr<nn::ModuleBuffer>>& buffers() const;
  /// Sets buffers of this rank: `fill` writes all of one to the host memory that it is given. Only of those that are
  /// `wanted` (empty: all). Not collective.
  void fill_buffers(const std::function<void(const nn::ModuleBuffer&, void* out)>& fill,
                    const std::function<bool(const nn::ModuleBuffer&)>& wanted = {});

  /// Throws InvalidUsage, with the reason, unless forward and backward are the same work on one stream in every step.
  void require_graphable() const;
  /// A graph has done what a last backward of the whole model does.
  void note_replayed() { gradients_ = Gradients::complete; }

  /// What is this rank's alone, f32, the device's, in the order of the compute stream: what the collective plug-ins
  /// carry from step to step, named by collective, and with a period the replica's parameters and states. Not
  /// collective.
  std::vector<CollectivePlugin::State> plugin_state();
  /// Sets all of it: `fill` writes the count of each for this rank. Empty: as at the beginning. Not collective.
  void load_plugin_state(const std::function<void(const CollectivePlugin::State&, int rank, float* out)>& fill);
  /// Of this rank, for one collective.
  CollectiveStats collective_stats(comm::OpKind collective) const;

  /// Drops a half-done step after an exception, and what the collective plug-ins carried over; parameters and optimizer
  /// are as they were before it, buffers as its forward left them.
  void abort_step();

  struct UnitStats {
    std::string name;
    std::int64_t elements = 0;  ///< of the parameters
    std::int64_t padding = 0;   ///< beyond them: between parameters and at the end
    bool kept_after_forward = false;
    bool is_root = false;
    Strategy strategy;
    std::size_t peak_bytes = 0;  ///< so far, of what it leased: unsharded parameters and gradients
  };
  std::vector<UnitStats> units() const;  ///< in forward order
  std::vector<UnitSize> unit_sizes() const;
  /// That of most units, as it is laid over the mesh.
  const Strategy& strategy() const { return options_.strategy; }
  const MeshShape& mesh() const;
  int rank() const;
  EngineTraffic traffic() const;
  /// Bytes that this engine's norms send per step, at most over ranks.
  std::uint64_t control_formula_bytes() const;
  /// ... and what this rank sends per step, in one call, where buffers are rank 0's (EngineTraffic::broadcast).
  std::uint64_t buffer_formula_bytes() const;
  std::uint64_t copied_bytes() const;
  /// Between this rank's device and its shards in the host's memory. Cumulative.
  OffloadBytes offload_bytes() const;
  TraceRecorder& recorder();

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
  /// Steps until replicas meet; 1 where they have no period.
  std::uint64_t period() const;
  void reserve_pieces();
  void prepare_norm();
  void add_unit(UnitSpec spec);
  void compute_norm();
  void mark_kept_units();
  /// Before values are written: what the last step left in flight comes first.
  void begin_values();
  /// What was written to parameters on the compute stream comes before the next gather.
  void publish_values();

  nn::Module& model_;
  const EngineOptions options_;
  std::unique_ptr<EngineResources> fabric_;
  std::vector<std::unique_ptr<ParamGroup>> units_;  // in forward order
  std::vector<Strategy> strategies_;                // of units_
  struct UnitProgress {
    int uses = 0;             // forwards recorded on the tape whose backward has not ended
    std::size_t entered = 0;  // of the unit's modules, in this forward
    bool reduced = false;     // in this backward
    std::vector<TraceRecorder::Span> spans;
  };
  std::vector<UnitProgress> progress_;
  std::vector<std::vector<std::size_t>> ahead_forward_, ahead_backward_;  // by unit: what the program wants gathered
  std::unique_ptr<ModuleBuffers> buffers_;
  std::unique_ptr<ExecOrderValidator> order_;
  bool orders_agreed_ = false;           // those of the first forward
  bool in_step_ = false;                 // something was gathered or reduced since the last one
  bool buffers_shared_ = false;          // in this step
  bool norm_parts_stale_ = false;        // gradients may have been written since they were formed
  std::vector<std::size_t> reducing_;    // oldest first
  std::vector<std::size_t> recomputed_;  // whose backward has not begun
  bool apart_ = false;                   // replicas have done steps since their last sync
  Buffer norm_parts_;  // f64: a slot per flat parameter and n-th of it; zero for those that other ranks hold
  Buffer norms_;       // f64: the slots' sums over the ranks, then the norm, then the factor
  std::size_t norm_slots_ = 0;
  std::vector<ShardingPlan::AxisSlice> norm_cuts_;  // along which ranks have parts of the norm
  std::uint64_t steps_ = 0;
  std::uint64_t skipped_steps_ = 0;
  double loss_scale_ = 1;
  bool last_backward_ = true;
  enum class Gradients : std::uint8_t { none, of_some, complete };  // of this step's microbatches
  Gradients gradients_ = Gradients::none;
};

}  // namespace tessera::fsdp
