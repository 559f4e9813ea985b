// The parameters of a unit: sharded at rest, unsharded while the unit computes.
#pragma once

#include <string>
#include <vector>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/engine/engine_resources.h"
#include "tessera/fsdp/engine/flat_parameter.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

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
