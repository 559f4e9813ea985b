// The gradient's norm over all ranks, and the factor that clips by it.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/fsdp/engine/engine_resources.h"
#include "tessera/fsdp/sharding_plan.h"

namespace tessera::fsdp {

struct EngineCore;

/// The norm of one engine and rank, for one layout of its units: make a new one after another layout.
class TESSERA_API GradNorm {
 public:
  /// Allocates the partial norms, and lets the units' reducers write them. `core` outlives the norm.
  explicit GradNorm(EngineCore& core);
  GradNorm(const GradNorm&) = delete;
  GradNorm& operator=(const GradNorm&) = delete;

  /// The partial norms are outdated: gradients may have been written since the reductions.
  void on_gradients_written() { outdated_ = true; }
  /// Computes norm and clip_factor() on the compute stream, after the reductions. `loss_scale`: the factor by which the
  /// gradients are too large. Collective.
  void compute(double loss_scale);
  double value() const;               ///< unscaled, before clipping; waits
  const double* clip_factor() const;  ///< in device memory; 1 without clipping, divided by the loss scale
  /// Bytes that compute() sends from a rank, at most over ranks.
  std::uint64_t formula_bytes() const;

 private:
  EngineCore& core_;
  std::vector<ShardingPlan::AxisSlice> slices_;  // axes over which the partial norms are distributed
  std::size_t slots_ = 0;
  Buffer partials_;  // f64: a slot per flat parameter and slice (1/n of it), zero for other ranks; then the counters
  Buffer totals_;    // f64: the slots' sums over the ranks, then the norm, then the clipping factor
  bool outdated_ = false;
};

}  // namespace tessera::fsdp
