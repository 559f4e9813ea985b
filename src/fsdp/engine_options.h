// What an engine can be told.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/mesh.h"
#include "tessera/fsdp/strategy.h"
#include "tessera/fsdp/types.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/optimizer.h"

namespace tessera::fsdp {

/// When a backward gathers the next unit.
enum class BackwardPrefetch : std::uint8_t {
  pre,   ///< before a unit's backward is computed: more is gathered at a time, and gathers have longer
  post,  ///< after it, before its gradients are reduced
};

/// Whose values a model's buffers have; every rank has all of them, whatever the strategy.
enum class BufferSync : std::uint8_t {
  own,         ///< each rank's
  first_rank,  ///< rank 0's: broadcast before each step's first forward under a tape
};

/// Units to gather, in this order, when one begins; all by name. One that turns out to be needed otherwise is gathered
/// when it is needed; one that isn't needed goes back unused.
struct PrefetchOrder {
  std::map<std::string, std::vector<std::string>> forward, backward;
};

struct EngineOptions {
  Strategy strategy = default_strategy();
  std::optional<MeshShape> mesh;  ///< nothing: default_mesh() for one host
  std::string wrap = "block";     ///< see make_units()
  WrapPolicy wrap_policy;         ///< instead: a unit for each module that is chosen
  /// Parameters that the engine leaves alone: it doesn't shard, reduce, update, show or save them. The program gives
  /// them memory (Module::materialize of the module that has them) and does what is to be done.
  IgnoredParameters ignored;
  /// Another strategy for some units, on the same mesh and with the same collectives; nothing: `strategy`.
  std::function<std::optional<Strategy>(const UnitSpec&)> unit_strategy;
  int prefetch = 1;  ///< units gathered ahead, forward and backward; 0: none
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  PrefetchOrder prefetch_order;  ///< for the units that it lists, instead of the neighbours
  /// No unit is gathered ahead where that would make more than so many, or so many bytes of them, that are gathered or
  /// on their way, the root apart. The one that computes counts, and is gathered in any case. 0: no limit.
  int limit_all_gathers = 0;
  std::size_t limit_gather_bytes = 0;
  /// Nothing: the root and the last unit stay gathered between forward and backward. true: the root only; false: all.
  std::optional<bool> reshard_after_forward;
  /// k: what is resharded after forward stays sharded over k neighbours only, so that the backward gathers among them;
  /// it costs a k-th of the parameters. Divides the shards of the mesh. 0: over all.
  int reshard_group_size = 0;
  /// false: between a step's backwards units stay gathered; the last one reshards them in any case.
  bool reshard_after_backward = true;
  nn::OptimizerConfig optimizer;
  /// Of gradients while they are reduced and kept: that of the parameters (nothing), or f32.
  std::optional<DType> reduce_dtype;
  /// What the strategy shards lies in the host's memory and comes to the device when it is needed. Not for devices that
  /// compute in the host's memory, nor for strategies that shard nothing.
  bool cpu_offload = false;
  /// With cpu_offload: parameters that the optimizer updates at a time. The device has room for three such pieces.
  std::int64_t offload_chunk_elements = std::int64_t{1} << 20;
  double clip_norm = 0;  ///< 0: no clipping
  nn::kernels::Norm norm = nn::kernels::Norm::two;
  bool measure_norm = false;  ///< compute grad_norm() also without clipping
  /// A step in which a gradient of any rank isn't finite changes nothing on any. For f16; see GradientScaler.
  bool use_loss_scaling = false;
  BufferSync buffers = BufferSync::own;
  bool poison = false;  ///< fill released buffers with NaN
  CollectiveRegistry collectives = CollectiveRegistry::built_in();
};

}  // namespace tessera::fsdp
