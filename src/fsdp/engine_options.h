// The options of an engine.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/fsdp/wrap.h"

namespace tessera::fsdp {

/// When a backward unshards the next unit.
enum class BackwardPrefetch : std::uint8_t {
  pre,   ///< before a unit's backward is computed: more units are unsharded at a time, and all-gathers have more time
  post,  ///< after a unit's backward, before its gradients are reduced
};

/// The ranks whose values a model's buffers have. Every rank holds all buffers under every strategy.
enum class BufferSync : std::uint8_t {
  own,         ///< each rank's own
  first_rank,  ///< rank 0's: broadcast before each step's first forward under a tape
  maximum,     ///< the largest of all ranks', by element: an all_reduce then, and before a checkpoint. For f32 buffers
};

/// Units to prefetch, in this order, when a unit begins; all by name. A unit that is needed but not listed is unsharded
/// when it is needed; a listed unit that is not needed is resharded unused.
struct PrefetchOrder {
  std::map<std::string, std::vector<std::string>> forward,  ///< units by the one whose forward begins
      backward;                                             ///< units by the one whose backward begins
};

/// The elements of one parameter whose update is this rank's: all of it where the optimizer is replicated. The arrays
/// are on the device, and their work is in the order of Runtime::stream().
struct OptimizerShard {
  const Parameter& parameter;         ///< outlives the call
  ElementRange range;                 ///< range in elements of the parameter
  float* values = nullptr;            ///< values to update; of half-precision parameters the f32 master weights
  const void* gradients = nullptr;    ///< averaged over the ranks, not yet multiplied by gradient_scale
  DType gradient_dtype = DType::f32;  ///< dtype of `gradients`
  std::array<float*, kMaxStateSlots> state = {};  ///< the first `slots` are set; zeros before the first step
};

/// An optimizer of the program's own. Where ranks hold the same elements, it computes the same for them.
struct ProgramOptimizer {
  /// f32 values of state for each element, at most kMaxStateSlots. The engine shards and saves them.
  int slots = 0;
  /// Appends the update to Runtime::stream(). Called in Engine::step() for each parameter, in the order of the units,
  /// or for parts of it with cpu_offload. OptimizerStep says by what to multiply the gradients, and when to change
  /// nothing.
  std::function<void(const OptimizerShard& shard, const OptimizerStep& step)> update;
};

/// Settings of an engine. Every rank passes the same ones; the constructor throws Mismatch where it sees that they
/// differ.
struct EngineOptions {
  Strategy strategy = strategies::fsdp();  ///< what is sharded over which axes; default: everything over all ranks
  std::optional<MeshShape> mesh;           ///< empty: default_mesh() for one host
  std::string wrap = "block";              ///< see make_units()
  WrapPolicy wrap_policy;                  ///< overrides `wrap`: a unit for each module that the predicate selects
  /// Parameters that the engine ignores: it does not shard, reduce, update, visit or save them. The program allocates
  /// their memory (Module::materialize of the module that has them) and does everything else for them.
  IgnoredParameters ignored;
  /// Overrides the strategy of some units, on the same mesh and with the same collectives; empty: `strategy`.
  std::function<std::optional<Strategy>(const UnitSpec&)> unit_strategy;
  int prefetch = 1;                                            ///< units prefetched, forward and backward; 0: none
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;  ///< when a backward unshards the next unit
  PrefetchOrder prefetch_order;  ///< replaces prefetching of neighbors for the units that it lists
  /// Upper bounds on the units that are unsharded or whose all-gather is in flight, by number and by bytes; the root is
  /// not counted. The unit that computes counts, and is unsharded in any case; no unit is prefetched beyond a bound. 0:
  /// no limit.
  int limit_all_gathers = 0;
  std::size_t limit_gather_bytes = 0;  ///< the bound in bytes; see limit_all_gathers
  /// Empty: the root and the last unit stay unsharded between forward and backward. true: the root only; false: all.
  std::optional<bool> reshard_after_forward;
  /// k: after forward, units are resharded over k neighboring ranks only (secondary shards), so that the backward
  /// all-gathers among them; this costs 1/k of the parameters. k divides the shards of the mesh. 0: over all shards. No
  /// effect under a strategy whose parameters are not sharded.
  int reshard_group_size = 0;
  /// false: units stay unsharded between a step's backwards; the last backward reshards them in any case.
  bool reshard_after_backward = true;
  OptimizerConfig optimizer;                          ///< default: AdamW
  std::optional<ProgramOptimizer> program_optimizer;  ///< replaces `optimizer`
  /// dtype of gradients while they are reduced and kept: that of the parameters (empty), or f32.
  std::optional<DType> reduce_dtype;
  /// CPU offload: sharded state lies in host memory and is copied to the device when it is needed. Not for devices that
  /// compute in host memory, nor for strategies that shard nothing.
  bool cpu_offload = false;
  /// Elements that the optimizer updates at a time with cpu_offload. The device has room for three such chunks.
  std::int64_t offload_chunk_elements = std::int64_t{1} << 20;
  double clip_norm = 0;       ///< 0: no clipping
  Norm norm = Norm::two;      ///< norm that is clipped and measured
  bool measure_norm = false;  ///< compute grad_norm() also without clipping
  /// A step in which a gradient of any rank is not finite changes nothing on any rank. For f16; see GradientScaler.
  bool use_loss_scaling = false;
  BufferSync buffers = BufferSync::own;                             ///< ranks whose values the model's buffers have
  bool poison = false;                                              ///< fill released buffers with NaN
  CollectiveRegistry collectives = CollectiveRegistry::built_in();  ///< plug-ins that the strategy may name

  /// f32 values of optimizer state for each element.
  int optimizer_slots() const { return program_optimizer ? program_optimizer->slots : state_slots(optimizer); }
  /// Whether Engine::step() computes the gradient norm.
  bool measures_norm() const { return clip_norm > 0 || measure_norm || use_loss_scaling; }
};

}  // namespace tessera::fsdp
