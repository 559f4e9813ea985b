// Strategies are data: over which mesh axes each kind of state is sharded. The engine executes them by one path.
#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/fsdp/types.h"

namespace tessera::fsdp {

/// A named mesh axis; see mesh.h.
using Axis = std::string;
inline const Axis kReplicateAxis = "replicate";
inline const Axis kShardAxis = "shard";
/// Groups of shards, where parameters are resharded to neighbours only: the mesh is replicate x group x shard then.
inline const Axis kGroupAxis = "group";
/// Over which axes a thing is sharded; empty: every rank holds all of it.
using Axes = std::set<Axis>;

/// What replicas that went their own way do with the mean of their ways: a step of SGD from where they met before. The
/// default makes it their mean.
struct OuterOptimizer {
  double learning_rate = 1;
  double momentum = 0;
  bool nesterov = false;
};

/// What is exchanged over an axis, and when: gradients in every step, or parameter deltas after every `period` of them.
struct Sync {
  enum class When : std::uint8_t { microbatch, step, period };
  enum class What : std::uint8_t { gradient, parameter_delta };
  When when = When::microbatch;
  What what = What::gradient;
  int period = 1;        ///< steps
  OuterOptimizer outer;  ///< of parameter deltas
};

/// Derived by the engine: where the optimizer is sharded, gradients are reduce-scattered, elsewhere all-reduced; where
/// parameters are replicated and the optimizer is sharded, parameters are all-gathered after the step. `gradient` says
/// only what is kept. Example: ZeRO-1 is {.optimizer = {"shard"}}.
struct Strategy {
  std::string name;
  Axes param_at_rest;
  Axes param_after_forward;
  Axes gradient;
  Axes optimizer;
  std::map<Axis, Sync> sync;         ///< axes that are not listed: gradients, every microbatch
  std::string all_gather = "plain";  ///< names of the collective plug-ins that carry the three
  std::string reduce_scatter = "plain";
  std::string all_reduce = "plain";
  bool two_axes = false;  ///< wants a mesh of replicas x shards rather than one axis
};

/// When gradients are reduced in a step of several microbatches.
enum class Accumulation : std::uint8_t {
  every,    ///< every microbatch: what is kept grows, and no more memory is needed than for one
  last,     ///< after the last one: fewest bytes, but full gradients are held until then
  scatter,  ///< scattered every microbatch, all-reduced over the other axes after the last: for replicas of shards
};
/// "every", "last", "scatter". Throws InvalidUsage.
TESSERA_API Accumulation parse_accumulation(std::string_view name);
/// The strategy with Sync::when of every axis set accordingly.
TESSERA_API Strategy with_accumulation(Strategy strategy, Accumulation accumulation);

/// The axis whose replicas meet once in a period, or "".
TESSERA_API Axis periodic_axis(const Strategy& strategy);
/// What may be set of it; nothing: as it is.
struct SyncOverrides {
  std::optional<int> steps;
  std::optional<double> outer_learning_rate;
  std::optional<double> outer_momentum;
};
/// Throws InvalidUsage for a strategy without one.
TESSERA_API Strategy with_period(Strategy strategy, const SyncOverrides& period);

/// The strategy on a mesh whose shards are cut into groups: what it shards over `shard` is sharded over both axes, but
/// after forward over the inner one only.
TESSERA_API Strategy over_groups(Strategy strategy);

/// ddp zero1 zero2 fsdp hsdp shard_grad_op diloco local_sgd, or one of PyTorch's names (no_shard, full_shard,
/// hybrid_shard), which gives the strategy under our name; or FILE.so:NAME, one of a shared object (plugin.h). Throws
/// InvalidUsage that lists the known ones.
TESSERA_API Strategy strategy_named(std::string_view name);

class CollectiveRegistry;
struct MeshShape;
struct Precision;

/// A strategy's name, and after each + what carries its collectives: "fsdp+int8" (those that have a plug-in int8),
/// "fsdp+all_gather=int8+reduce_scatter=bf16". All of this is then its name. Either may be of a shared object:
/// "./mine.so:mine+./mine.so:half". Throws InvalidUsage.
TESSERA_API Strategy parse_strategy(std::string_view text, const CollectiveRegistry& collectives);

/// Throws InvalidUsage, naming collective and plug-in, where one that the strategy uses on this mesh can't carry what
/// it would have to.
TESSERA_API void validate_collectives(const Strategy& strategy, const MeshShape& mesh, Precision precision,
                                      const CollectiveRegistry& collectives);

/// Everything sharded over all ranks: what an engine does unless told otherwise.
TESSERA_API Strategy default_strategy();

/// Without aliases, in the order of the reports.
TESSERA_API std::vector<std::string> strategy_names();

/// Throws InvalidUsage, naming the state and the axis, where the parts don't fit together: each kind of state may be
/// sharded only where the next one is (parameters after forward <= at rest <= ..., gradients <= optimizer).
TESSERA_API void validate(const Strategy& strategy);

/// And where it doesn't fit this mesh: an axis that the mesh hasn't got, or a kind of state that is sharded over an
/// outer axis and not over an inner one over which the next kind is (Unsupported).
TESSERA_API void validate(const Strategy& strategy, const MeshShape& mesh);

/// Throws InvalidUsage where the strategy shards nothing: only shards can lie in the host's memory.
TESSERA_API void require_offloadable(const Strategy& strategy);

/// One line: what is sharded over what.
TESSERA_API std::string describe(const Strategy& strategy);

}  // namespace tessera::fsdp
