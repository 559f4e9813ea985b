// The engine: trains any model (model.h) under any strategy, by one code path. Of an nn::Module, with nn_model.h:
//
//   fsdp::Engine engine(model, world, {.strategy = fsdp::strategies::fsdp()});
//   engine.initialize(seed);
//   for (...) {
//     const nn::TapeScope recording(context);
//     const nn::Tensor loss = model.loss(tokens, targets);  // hooks unshard each unit, and reshard it afterwards
//     loss.backward();                                      // hooks unshard again, and reduce each unit's gradients
//     engine.step(learning_rate);
//   }
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "tessera/base/trace.h"
#include "tessera/comm/communicator.h"
#include "tessera/fsdp/engine_options.h"
#include "tessera/fsdp/engine_stats.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/model.h"
#include "tessera/fsdp/sharded_state.h"

namespace tessera::fsdp {

struct EngineCore;
class UnitScheduler;

/// One per rank and model; used by one thread. `model` and `world` outlive it. The constructor is collective; so are
/// step(), sync_replicas(), apply_requires_grad(), the functions of state() that say so, and a forward or backward of
/// the model. Every rank makes the same calls in the same order.
class TESSERA_API Engine {
 public:
  /// Divides the model into units, allocates the sharded state and installs the hooks; initialize(), state().load() or
  /// restore() then sets the values. Throws Mismatch where options, units or products differ between the ranks, and
  /// InvalidUsage or Unsupported if the options do not fit model, world or device.
  Engine(Model& model, comm::Communicator& world, EngineOptions options);
  /// The same for another library's model, for which an Adapter is included, such as nn_model.h.
  template <class M>
  requires(!std::derived_from<M, Model>) Engine(M& model, comm::Communicator& world, EngineOptions options)
      : Engine(Adapter<M>::make(model), world, std::move(options)) {}
  ~Engine();

  /// The same as ShardedState::initialize().
  void initialize(std::uint64_t seed) { state_.initialize(seed); }
  /// Whether the following backwards are the last of their step. Before the last one, gradients accumulate as the
  /// strategy says (Sync::when); scale the loss to its share of the step, as in backward(loss, 1.0 / microbatches).
  void set_is_last_backward(bool last);
  /// Call after the last backward: waits for the reductions, clips, updates, and submits the all-gathers that follow an
  /// update. Throws InvalidUsage if no last backward of the whole model came before.
  void step(double learning_rate);
  /// Synchronizes the replicas now, under a strategy with a sync period, as the engine does at the end of each period.
  /// No effect where they have just synchronized, or synchronize in every step. Collective.
  void sync_replicas();
  /// Makes the compute stream wait for the operations that step() left in flight; otherwise the next forward does. For
  /// measurements.
  void wait();
  /// Drops an incomplete step after an exception, and the state of the collective plug-ins. Parameters and optimizer
  /// are as before the step, buffers as its forward left them.
  void abort_step();

  /// Sets the factor by which gradients are too large from the next backward on, because the loss is; step() divides by
  /// it. Throws InvalidUsage without use_loss_scaling.
  void set_loss_scale(double scale);
  double loss_scale() const { return loss_scale_; }  ///< 1 by default
  /// The gradient norm of the last step, over all ranks, before clipping, and unscaled. Waits. Throws InvalidUsage
  /// unless one of clip_norm, measure_norm and use_loss_scaling is set.
  double grad_norm();
  /// Visits this rank's gradients after the last backward and until step(), averaged over the ranks and still
  /// multiplied by loss_scale(). The data is in device memory, in the order of the compute stream. step() clips and
  /// uses what the visitor writes. Throws InvalidUsage without a last backward, Unsupported if the norm has been
  /// computed and the gradients are in host memory.
  void for_each_gradient(const std::function<void(const GradientShard&)>& visitor);

  /// Call after parameters began or ceased to require a gradient: rebuilds the layout of the affected units without
  /// changing a value. The optimizer of a newly trained parameter starts here; a newly frozen parameter loses its
  /// optimizer state, and a half-precision one its master weights. Call between two steps. Collective: throws Mismatch
  /// where the ranks disagree.
  void apply_requires_grad();

  std::uint64_t steps() const;              ///< steps made, including skipped ones
  std::uint64_t skipped_steps() const;      ///< steps that changed nothing; the optimizer does not count them
  Model& model() const;                     ///< the model given to the constructor, or its Adapter's
  const EngineOptions& options() const;     ///< the constructor's, with a mesh and the strategy that fits it
  const Mesh& mesh() const;                 ///< mesh of all ranks of the world
  ShardedState& state() { return state_; }  ///< values, optimizer state, buffers and plug-in state
  const EngineStats& stats() const { return stats_; }  ///< units, traffic and counters
  TraceRecorder& trace();                              ///< the events of this rank

 private:
  friend class GraphedStep;
  Engine(std::unique_ptr<Model> adapted, comm::Communicator& world, EngineOptions options);
  void begin();

  const std::unique_ptr<Model> adapted_;  // null if the program adapts its model itself
  const std::unique_ptr<EngineCore> core_;
  std::unique_ptr<UnitScheduler> scheduler_;
  ShardedState state_;
  EngineStats stats_;
  double loss_scale_ = 1;
};

}  // namespace tessera::fsdp
