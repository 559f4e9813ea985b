// The gradients of a unit, from the backward that writes them to the gradients that are kept.
#pragma once

#include <functional>
#include <vector>

#include "tessera/fsdp/engine/param_group.h"
#include "tessera/fsdp/sharded_state.h"

namespace tessera::fsdp {

/// Reduces the gradients of one parameter group. Methods are asynchronous with respect to the host.
///
/// idle -> writing in prepare_gradients(), -> reducing in start_reduction(), -> idle once advance_reduction() has
/// started and waited for every stage. A backward that reduces nothing goes from writing to idle.
class TESSERA_API GradReducer {
 public:
  /// `resources` and `group` outlive the reducer.
  GradReducer(EngineResources& resources, ParamGroup& group) : resources_(resources), group_(group) {}
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  void prepare_gradients();  ///< provides memory for a backward; no effect if there is some
  /// `last`: this is the step's last backward. Gradients of earlier backwards accumulate: the kept ones, or the full
  /// ones if nothing is reduced before the last backward. A parameter that the backward did not use contributes zeros.
  void start_reduction(bool last);
  bool reducing() const { return state_ == State::reducing; }
  /// Makes the compute stream wait for the stage in flight, and starts the next one, if any.
  void advance_reduction();
  /// Reached once the reduced gradients are in host memory, with CPU offload.
  const Event& stored() const { return stored_; }
  /// See Engine::for_each_gradient(); after the reductions.
  void for_each_gradient(const std::function<void(const GradientShard&)>& visitor);

  /// Partial norms: an f64 for each trainable flat parameter and slice (1/n of it).
  std::size_t norm_slots() const;
  /// Where a step's last reduction writes this rank's partial norms. Slots of slices that this rank does not hold are
  /// left unchanged.
  struct NormSlots {
    double* partials = nullptr;         // null: the norm is not computed
    std::uint32_t* counters = nullptr;  // one for each slot: see NormSlices
    Norm norm = Norm::two;
    std::vector<ShardingPlan::AxisSlice> slices;  // axes over which each rank writes only its own slices
  };
  void set_norm_slots(NormSlots slots) { norm_ = std::move(slots); }
  void update_norm_partials();  ///< recomputes the partial norms after gradients were written

  /// Drops gradients and reductions in flight, after an error.
  void reset();

 private:
  enum class State : std::uint8_t { idle, writing, reducing };
  /// The sum over this step's earlier microbatches: in the full gradients if nothing is reduced before the last
  /// backward, else in the kept ones. `none` in the first microbatch.
  enum class Accumulated : std::uint8_t { none, in_full, in_kept };

  bool reduces_in_lease() const;
  void end_writing(FlatParameter& flat);
  void cast_gradients(FlatParameter& flat);
  void add_gradients(const FlatParameter& flat, const void* from, void* to, std::size_t count);
  void start_stage();
  std::vector<FlatTransfer> stage_transfers(const ReduceStage& stage);
  comm::ReduceOp op_of(const ReduceStage& stage) const;
  void add_earlier_microbatches();
  void finish_reduction();
  void store_gradients();

  EngineResources& resources_;
  ParamGroup& group_;
  State state_ = State::idle;
  Accumulated accumulated_ = Accumulated::none;
  bool last_ = true;                       // this backward is the step's last
  std::size_t stage_ = 0, stages_ = 0;     // the stage in flight, and the number of stages, of this backward
  std::vector<ElementRange> stage_input_;  // per trainable flat parameter: input of the next stage
  WorkChain reductions_;
  Event stored_;
  NormSlots norm_;
};

}  // namespace tessera::fsdp
