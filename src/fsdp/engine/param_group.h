// The parameters of a unit: sharded at rest, unsharded while the unit computes.
#pragma once

#include <string>
#include <vector>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/engine/engine_resources.h"
#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/lease.h"
#include "tessera/fsdp/precision.h"
#include "tessera/fsdp/sharding_plan.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

struct EngineResources;

/// Values, gradient, and optimizer state with master weights: each in device memory, or in host memory
/// (ShardingPlan::offloaded). `x_at(element)` is the address of an element of the whole flat parameter, which must be
/// in the range that the buffer holds.
struct FlatParameter {
  /// Allocates zeroed state for what the plan keeps on this rank.
  FlatParameter(EngineResources& resources, const ShardingPlan& plan, FlatLayout layout, int optimizer_slots);

  FlatLayout layout;
  Precision precision;
  ElementRange rest, kept, optimized;  // that this rank holds of values, of gradients, of the optimizer's state
  Buffer values;                       // at rest: this rank's shard, or all where replicated
  Buffer gradient;                     // kept: this rank's shard, or all
  std::vector<Buffer> state;           // optimizer state: this rank's shard
  Buffer master_weights;               // f32 master weights of half-precision values: the optimizer's shard
  Buffer anchor;                       // f32, with a sync period: the anchor, the optimizer's shard
  Buffer outer_momentum;               // the outer optimizer's momentum, if any
  Buffer full_values;                  // in f32, or an encoding's bytes, between gather_full() and release_full()
  Lease unsharded;                     // parameters, between unshard() and reshard()
  Lease secondary;                     // secondary shard, between forward and backward
  void* written_at = nullptr;          // where the backward writes, since bind_gradients()
  Lease written_gradient;              // what a backward writes, if it is converted for reduction
  Lease full_gradient;                 // between the backward and the end of the first reduction stage
  Lease delta;                         // between start_sync() and finish_sync()

  bool quantized() const { return layout.dtype == DType::u8; }
  bool trainable() const { return layout.trainable; }
  static std::byte* at(void* base, DType dtype, std::int64_t element) {
    return static_cast<std::byte*>(base) + element * static_cast<std::int64_t>(size_of(dtype));
  }
  static float* f32_at(const Buffer& buffer, std::int64_t element) {
    return static_cast<float*>(buffer.data()) + element;
  }
  void* value_at(std::int64_t element) const { return at(values.data(), layout.dtype, element - rest.begin); }
  float* master_at(std::int64_t element) const { return f32_at(master_weights, element - optimized.begin); }
  float* state_at(std::size_t slot, std::int64_t element) const {
    return f32_at(state[slot], element - optimized.begin);
  }
  /// Kept gradients, in the reduce dtype.
  void* gradient_at(std::int64_t element) const { return at(gradient.data(), precision.reduce, element - kept.begin); }
  void* leased_gradient_at(std::int64_t element) const { return at(full_gradient.data(), precision.reduce, element); }
  /// The leased gradient if there is one, else the kept one.
  void* reduced_gradient_at(std::int64_t element) const {
    return full_gradient ? leased_gradient_at(element) : gradient_at(element);
  }
  /// The values that the optimizer updates.
  float* optimized_values() const {
    return master_weights ? master_at(optimized.begin) : static_cast<float*>(value_at(optimized.begin));
  }
  std::size_t reduced_bytes() const { return static_cast<std::size_t>(layout.padded) * size_of(precision.reduce); }
  std::size_t leased_bytes() const;  ///< of parameters and gradients

  /// Makes the parameters' tensors refer to the whole flat parameter at `base`; likewise their gradients. `keep`: the
  /// backward adds to what is there.
  void bind_parameters(void* base);
  void bind_gradients(void* base, bool keep);
};

/// The parameter group of a unit. Methods are asynchronous with respect to the host.
class TESSERA_API ParamGroup {
 public:
  /// Allocates the flat parameters. `resources` outlives the group.
  ParamGroup(EngineResources& resources, UnitSpec spec, ShardingPlan plan, int optimizer_slots);
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& name() const { return spec_.name; }
  const UnitSpec& spec() const { return spec_; }
  const ShardingPlan& plan() const { return plan_; }
  std::vector<FlatParameter>& flats() { return flats_; }
  const std::vector<FlatParameter>& flats() const { return flats_; }
  bool kept_after_forward() const { return kept_after_forward_; }
  void set_kept_after_forward(bool kept) { kept_after_forward_ = kept; }
  std::int64_t elements() const;  ///< of the parameters
  std::int64_t padding() const;
  std::size_t bytes() const;  ///< unsharded
  /// The peak size of its leases: unsharded parameters and gradients, in all their forms.
  std::size_t peak_bytes() const { return peak_bytes_; }
  void update_peak_bytes();  ///< call after a lease was acquired
  /// The transfers of this unit in a collective, which are the same in every step.
  std::vector<TransferSpec> transfers_of(comm::OpKind collective) const;

  /// Unsharded or unsharding; always true if replicated.
  bool unsharded() const { return state_ != State::sharded; }
  void unshard();           ///< starts the all-gathers; no effect unless sharded
  void wait_for_unshard();  ///< work that follows on the compute stream may read the parameters
  /// No effect on replicated parameters. `for_backward`: a backward follows, for which the plan may keep a secondary
  /// shard.
  void reshard(bool for_backward = false);
  void wait_for_gathers();  ///< makes the compute stream wait for all-gathers that an optimizer step started
  /// Orders the next all-gathers after what the compute stream has updated; starts those that follow a step.
  void all_gather_updated();
  /// Orders the next uploads after `stored`: the optimizer's results are then in host memory.
  void set_stored(Event stored) { stored_ = std::move(stored); }

  /// Rebuilds the flat parameters, whose state is then zero, from today's dtypes and requires_grad.
  void lay_out();
  /// Whether a parameter began or ceased to require a gradient since the layout was made.
  bool outdated() const;
  /// Drops all-gathers in flight, after an error.
  void reset();

 private:
  /// sharded -> unsharding in unshard(), -> unsharded in wait_for_unshard(), -> sharded in reshard(). Parameters that
  /// are replicated are unsharded from the beginning, and unsharding after an update that all-gathers follow.
  enum class State : std::uint8_t { sharded, unsharding, unsharded };
  /// The input or output buffer of an all-gather for a flat parameter.
  struct GatherTarget {
    Lease* lease = nullptr;
    std::int64_t first = 0;  // the lease's first element
    void* at(const FlatParameter& flat, std::int64_t element) const {
      return FlatParameter::at(lease->data(), flat.layout.dtype, element - first);
    }
  };
  GatherTarget target_after(FlatParameter& flat, std::size_t gathers);
  void lease_for_gather(FlatParameter& flat, Stream& stream);
  const void* first_input(FlatParameter& flat);
  void gather(std::size_t already);
  void gather_axis(std::size_t index, const std::vector<const void*>& inputs);
  void wait_for_round(Stream& stream);
  void wait_for_gather();

  EngineResources& resources_;
  const UnitSpec spec_;
  const ShardingPlan plan_;
  const int optimizer_slots_;
  std::vector<FlatParameter> flats_;
  bool kept_after_forward_ = false;
  State state_ = State::sharded;
  WorkChain gathers_;
  Event loaded_;   // parameters were uploaded from the host, if no all-gather follows
  Event updated_;  // the optimizer has updated this unit: its all-gather waits for no other unit's update
  Event stored_;   // the optimizer's results are in host memory
  std::size_t peak_bytes_ = 0;
};

}  // namespace tessera::fsdp
