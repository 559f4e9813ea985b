// A sharding plan: a strategy applied to a mesh, with names and axes resolved.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

/// One stage of a gradient reduction, from each rank's full gradients to the gradients that are kept.
struct ReduceStage {
  Axis axis;             ///< over which the ranks reduce
  bool scatter = false;  ///< reduce_scatter, else all_reduce
  bool to_kept = false;  ///< the result goes to the buffer of kept gradients; else it stays where the input was
  comm::ReduceOp op;     ///< a sum; the last stage also divides by the number of ranks
};

/// What each unit does under a strategy on a mesh. Axes of length 1 are omitted: they need no collective. The plan is
/// the same on every rank, except for `coordinate`.
struct ShardingPlan {
  std::vector<Axis> gather_axes;       ///< axes that shard parameters at rest, in the order of their all-gathers
  bool sharded_after_forward = false;  ///< also after forward (except for the root and the last unit)
  /// After forward, parameters stay sharded over fewer axes: the result of the first all-gathers is kept as the
  /// secondary shard, and the backward all-gathers over the other axes only.
  bool keeps_secondary = false;
  bool unshards_to_lease = false;       ///< parameters in use are not those at rest: units are unsharded into leases
  bool gradient_sharded = false;        ///< full gradients are leased, a shard is kept
  std::vector<ReduceStage> reductions;  ///< reductions in order; each stage reads the result of the previous one
  std::size_t reduced_each = 0;         ///< the first so many run for every microbatch, the others after the last one
  /// outermost first, where parameters are replicated and the optimizer is sharded
  std::vector<Axis> gather_after_step;

  /// This rank's range of a flat parameter of `padded` elements at rest.
  ElementRange rest(std::int64_t padded) const;
  /// The range that is complete after the first `gathered` of gather_axes.
  ElementRange unsharded(std::int64_t padded, std::size_t gathered) const;
  ElementRange gradient_range(std::int64_t padded) const;  ///< this rank's range of the kept gradients
  ElementRange optimizer(std::int64_t padded) const;       ///< this rank's range of the optimizer state
  /// The range that is complete after the first `gathered` axes of gather_after_step.
  ElementRange after_gathers(std::int64_t padded, std::size_t gathered) const;

  /// The kinds of state in host memory.
  struct OffloadedState {
    bool parameters = false,  ///< at rest
        gradients = false,    ///< kept gradients
        optimizer = false;    ///< states and master weights
  };
  OffloadedState offloaded;  ///< all false without CPU offload

  /// Replicas that train independently for `steps` steps and then synchronize.
  struct SyncPlan {
    Axis axis;                                                ///< over which the replicas synchronize
    int replicas = 1;                                         ///< length of the axis
    int steps = 1;                                            ///< the sync period
    OuterOptimizer outer;                                     ///< applied to the mean delta
    bool has_momentum() const { return outer.momentum > 0; }  ///< whether the outer optimizer keeps a momentum buffer
  };
  std::optional<SyncPlan> periodic;  ///< empty: the replicas synchronize in every step

  /// One division of a range: part `coordinate` of `size` equal parts.
  struct AxisSlice {
    Axis axis;           ///< along which the range is divided
    int size = 1;        ///< length of the axis
    int coordinate = 0;  ///< coordinate of this rank on the axis
  };
  std::vector<AxisSlice> rest_slices,  ///< parameters at rest; each list in the order of application
      forward_slices,                  ///< parameters after forward
      gradient_slices,                 ///< kept gradients
      optimizer_slices;                ///< optimizer state
  std::vector<AxisSlice> rest_copies,  ///< axes that do not shard parameters at rest: their ranks hold the same values
      optimizer_copies;                ///< likewise of the optimizer

  /// The 1/n of a flat parameter of trained parameters that this rank represents: all ranks together cover each
  /// element exactly once.
  ElementRange own(std::int64_t padded) const;
  /// The same as own(), for frozen parameters.
  ElementRange own_frozen(std::int64_t padded) const;
};

/// Whether a unit stays unsharded between forward and backward. `resharded`: the program's setting, if any.
inline bool keeps_after_forward(bool sharded_after_forward, bool is_root, bool is_last, std::optional<bool> resharded) {
  if (!sharded_after_forward) return true;
  return is_root || (resharded ? !*resharded : is_last);
}

/// `range` narrowed by each slice in turn.
ElementRange narrow(ElementRange range, std::span<const ShardingPlan::AxisSlice> slices);

/// The slices of a mesh along these axes, innermost first, without axes of length 1.
std::vector<ShardingPlan::AxisSlice> slices_of(const Axes& axes, const Mesh& mesh);

/// Makes the plan. `cpu_offload`: sharded state is in host memory, also on a mesh of one rank. Throws InvalidUsage or
/// Unsupported if the strategy does not fit the mesh, or has nothing to offload.
TESSERA_API ShardingPlan make_plan(const Strategy& strategy, const Mesh& mesh, bool cpu_offload = false);

}  // namespace tessera::fsdp
