// A strategy laid over a mesh: what each unit must do, with names and axes resolved.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

/// One hop of the gradients' way from every rank's own to what is kept.
struct ReduceStage {
  Axis axis;
  bool scatter = false;  ///< reduce_scatter, else all_reduce
  bool to_kept = false;  ///< the result goes into the buffer that is kept; else it stays where the input was
  comm::ReduceOp op;     ///< a sum; the last stage divides, once, by the number of ranks
};

/// Axes of length 1 are gone: they need no collective. The same on every rank, but for `coordinates`.
struct ShardingPlan {
  std::vector<Axis> gather_axes;       ///< over which parameters at rest are sharded, in the order of their gathers
  bool sharded_after_forward = false;  ///< and again after forward (but for the root and the last unit)
  /// ... over fewer axes: what the first gathers have made stays until the backward, which does the others only.
  bool keeps_secondary = false;
  bool unshards_to_lease = false;  ///< what computes is not what is at rest: units are unsharded into leases
  bool gradient_sharded = false;   ///< full gradients are leased, a part is kept
  std::vector<ReduceStage> reductions;
  std::size_t reduced_each = 0;         ///< so many of them run for every microbatch, the others after the last one
  std::vector<Axis> gather_after_step;  ///< outermost first: parameters are replicated, the optimizer is sharded

  /// This rank's part of a flat parameter of `padded` elements, when sharded over these axes.
  ElementRange rest(std::int64_t padded) const;
  /// The part that is whole after the first `gathered` of gather_axes.
  ElementRange unsharded(std::int64_t padded, std::size_t gathered) const;
  ElementRange gradient_range(std::int64_t padded) const;
  ElementRange optimizer(std::int64_t padded) const;
  /// The part that is whole again after the first `gathered` axes of gather_after_step were gathered.
  ElementRange after_gathers(std::int64_t padded, std::size_t gathered) const;

  /// What lies in the host's memory.
  struct OffloadedState {
    bool parameters = false, gradients = false, optimizer = false;
  };
  OffloadedState offloaded;

  /// Replicas that go their own way for `steps` steps, and then meet.
  struct SyncPlan {
    Axis axis;
    int replicas = 1;
    int steps = 1;
    OuterOptimizer outer;
    bool has_momentum() const { return outer.momentum > 0; }
  };
  std::optional<SyncPlan> periodic;

  struct AxisSlice {
    Axis axis;
    int size = 1;
    int coordinate = 0;
  };
  std::vector<AxisSlice> rest_cuts, forward_cuts, gradient_cuts, optimizer_cuts;  ///< in the order in which they narrow
  std::vector<AxisSlice> rest_copies, optimizer_copies;  ///< the other axes: ranks that hold the same

  /// An n-th of a flat parameter that this rank holds and stands for: those of all ranks are the whole, each element
  /// once. Of what the optimizer changes, and of what stays as it is.
  ElementRange own(std::int64_t padded) const;
  ElementRange own_frozen(std::int64_t padded) const;
};

/// Whether a unit stays gathered between forward and backward. `resharded`: what the program says, if it does.
inline bool keeps_after_forward(bool sharded_after_forward, bool is_root, bool is_last, std::optional<bool> resharded) {
  if (!sharded_after_forward) return true;
  return is_root || (resharded ? !*resharded : is_last);
}

/// [0, padded) of a flat parameter, narrowed by each cut.
ElementRange narrow(ElementRange range, std::span<const ShardingPlan::AxisSlice> cuts);

/// How a mesh cuts along these axes, innermost first; axes of length 1 don't.
std::vector<ShardingPlan::AxisSlice> cuts_of(const Axes& axes, const Mesh& mesh);

/// `cpu_offload`: what the strategy shards lies in the host's memory, also on a mesh of one rank. Throws InvalidUsage
/// or Unsupported where the strategy doesn't fit the mesh, or has nothing to offload.
TESSERA_API ShardingPlan make_plan(const Strategy& strategy, const Mesh& mesh, bool cpu_offload = false);

}  // namespace tessera::fsdp
