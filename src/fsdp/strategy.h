// Strategies as data: the mesh axes that shard each kind of state. The engine executes them by one code path.
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
/// The axis between replicas of the shards.
inline const Axis kReplicateAxis = "replicate";
/// The axis over whose ranks state is sharded.
inline const Axis kShardAxis = "shard";
/// The axis between groups of shards, where parameters are resharded over neighbors only: the mesh is then replicate x
/// group x shard.
inline const Axis kGroupAxis = "group";
/// The axes that shard a kind of state; empty: every rank holds all of it.
using Axes = std::set<Axis>;

/// The outer optimizer: a step of SGD from the anchor by the averaged parameter deltas of the replicas. The default
/// sets the replicas to their mean.
struct OuterOptimizer {
  double learning_rate = 1;  ///< factor of the mean delta
  double momentum = 0;       ///< momentum of the mean deltas, over sync periods; 0: no state
  bool nesterov = false;     ///< Nesterov's form of the momentum
};

/// What the ranks of an axis exchange, and when: gradients in every step, or parameter deltas after every `period`
/// steps.
struct Sync {
  /// When the ranks exchange.
  enum class When : std::uint8_t {
    microbatch,  ///< exchanges in every backward
    step,        ///< exchanges in the last backward of a step
    period       ///< exchanges after every Sync::period steps
  };
  /// What the ranks exchange.
  enum class What : std::uint8_t {
    gradient,        ///< gradients, before the update
    parameter_delta  ///< changes of the parameters since the anchor
  };
  When when = When::microbatch;  ///< how often
  What what = What::gradient;    ///< parameter_delta only with `period`
  int period = 1;                ///< steps
  OuterOptimizer outer;          ///< optimizer of parameter deltas
};

/// The axes that shard each kind of state. The engine derives the collectives: where the optimizer is sharded,
/// gradients are reduce-scattered, elsewhere all-reduced; where parameters are replicated and the optimizer is sharded,
/// parameters are all-gathered after the step. `gradient` only says what is kept. Example: ZeRO-1 is {.optimizer =
/// {"shard"}}.
struct Strategy {
  std::string name;                      ///< name that parse_strategy() accepts
  Axes param_at_rest;                    ///< axes that shard parameters between steps
  Axes param_after_forward;              ///< axes that shard parameters from forward to backward
  Axes gradient;                         ///< axes that shard kept gradients
  Axes optimizer;                        ///< axes that shard optimizer state and master weights
  std::map<Axis, Sync> sync;             ///< axes that are not listed: gradients, every microbatch
  std::string all_gather = "plain";      ///< names of the plug-ins of the three collectives
  std::string reduce_scatter = "plain";  ///< reduces gradients over axes that shard the optimizer
  std::string all_reduce = "plain";      ///< reduces gradients or parameter deltas over the other axes
  bool two_axes = false;                 ///< uses a mesh of replicas x shards rather than one axis
};

/// When gradients are reduced in a step of several microbatches.
enum class Accumulation : std::uint8_t {
  every,  ///< every microbatch: kept gradients accumulate, and no more memory is needed than for one
  last,   ///< after the last one: fewest bytes, but full gradients are held until then
  /// reduce-scattered every microbatch, all-reduced over the other axes after the last: for replicas of shards
  scatter,
};
/// Parses "every", "last", "scatter". Throws InvalidUsage.
TESSERA_API Accumulation parse_accumulation(std::string_view name);
/// The strategy with Sync::when of every axis set accordingly, except an axis with a sync period.
TESSERA_API Strategy with_accumulation(Strategy strategy, Accumulation accumulation);

/// The axis whose replicas synchronize once per sync period, or "".
TESSERA_API Axis periodic_axis(const Strategy& strategy);
/// Settings of the sync period that replace those of the strategy; empty: unchanged.
struct SyncOverrides {
  std::optional<int> steps;                   ///< the sync period
  std::optional<double> outer_learning_rate;  ///< OuterOptimizer::learning_rate
  std::optional<double> outer_momentum;       ///< OuterOptimizer::momentum
};
/// The strategy with these settings. Throws InvalidUsage for a strategy without a sync period.
TESSERA_API Strategy with_period(Strategy strategy, const SyncOverrides& period);

/// The strategy on a mesh whose shards are divided into groups: state sharded over `shard` is sharded over both axes,
/// but after forward over the inner axis only.
TESSERA_API Strategy over_groups(Strategy strategy);

/// The strategy of this name: one of strategy_names(); PyTorch's no_shard, full_shard, hybrid_shard, which return the
/// strategy under this project's name; or FILE.so:NAME, of a plug-in file (plugin.h). Throws InvalidUsage that lists
/// the known names.
TESSERA_API Strategy strategy_named(std::string_view name);

/// The same strategies by functions, for C++.
namespace strategies {
inline Strategy ddp() { return strategy_named("ddp"); }      ///< shards nothing; gradients are averaged
inline Strategy zero1() { return strategy_named("zero1"); }  ///< shards the optimizer's state
inline Strategy zero2() { return strategy_named("zero2"); }  ///< shards gradients, too
inline Strategy fsdp() { return strategy_named("fsdp"); }    ///< shards parameters, too: ZeRO-3; the engine's default
inline Strategy hsdp() { return strategy_named("hsdp"); }    ///< fsdp() within each replica of a mesh of two axes
/// fsdp() with parameters that stay unsharded from forward to backward.
inline Strategy shard_grad_op() { return strategy_named("shard_grad_op"); }
/// hsdp() whose replicas synchronize by an outer optimizer after every 10 steps.
inline Strategy diloco() { return strategy_named("diloco"); }
inline Strategy local_sgd() { return strategy_named("local_sgd"); }  ///< likewise, and take their mean
}  // namespace strategies

class CollectiveRegistry;
struct MeshShape;
struct Precision;

/// Parses a strategy's name followed by collective plug-ins, each after a +: "fsdp+int8" (for the collectives that have
/// a plug-in int8), "fsdp+all_gather=int8+reduce_scatter=bf16". The whole text becomes the strategy's name. Strategy
/// and plug-ins may be from plug-in files: "./mine.so:mine+./mine.so:half". Throws InvalidUsage.
TESSERA_API Strategy parse_strategy(std::string_view text, const CollectiveRegistry& collectives);

/// Throws InvalidUsage, naming collective and plug-in, if a plug-in that the strategy uses on this mesh does not
/// support what it would have to transfer.
TESSERA_API void validate_collectives(const Strategy& strategy, const MeshShape& mesh, Precision precision,
                                      const CollectiveRegistry& collectives);

/// The names without aliases, in the order of the reports.
TESSERA_API std::vector<std::string> strategy_names();

/// Throws InvalidUsage, naming the state and the axis, if the kinds of state do not fit together: each may be sharded
/// only over axes over which the next one is (parameters after forward <= at rest <= ..., gradients <= optimizer).
TESSERA_API void validate(const Strategy& strategy);

/// Also checks that the strategy fits this mesh. Throws for an axis that the mesh does not have, and Unsupported for a
/// kind of state that is sharded over an outer axis but not over an inner axis over which the next kind is sharded.
TESSERA_API void validate(const Strategy& strategy, const MeshShape& mesh);

/// Throws InvalidUsage if the strategy shards nothing: only shards can be offloaded to host memory.
TESSERA_API void require_offloadable(const Strategy& strategy);

/// One line: the axes that shard each kind of state.
TESSERA_API std::string describe(const Strategy& strategy);

}  // namespace tessera::fsdp
