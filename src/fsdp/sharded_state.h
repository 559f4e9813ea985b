// The state of an engine: values, optimizer state, module buffers and plug-in state, set and read by range.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/model.h"

namespace tessera::fsdp {

struct EngineCore;

/// A range of a parameter, or of one of its optimizer states, that this rank holds.
struct ShardRange {
  const Parameter& parameter;  ///< outlives the visitor's call
  int state = -1;              ///< -1: the parameter's values
  ElementRange range;          ///< range in elements of the parameter
  DType dtype = DType::f32;    ///< dtype of the elements at `data`; f32 for optimizer states
  const void* data = nullptr;  ///< the first element of `range`; in device memory unless `offloaded`
  bool offloaded = false;      ///< `data` is in host memory, and already written
};

/// The range of a parameter's gradient with which this rank updates; the whole gradient where the optimizer is
/// replicated.
struct GradientShard {
  const Parameter& parameter;  ///< outlives the visitor's call
  ElementRange range;          ///< range in elements of the parameter
  DType dtype = DType::f32;    ///< dtype of the elements at `data`
  void* data = nullptr;        ///< may be written, identically on every rank where the optimizer is replicated
  bool offloaded = false;      ///< `data` is in host memory
};

/// The state of one engine and rank: Engine::state(). Used by the engine's thread, between two steps. Every function
/// that says so is collective: every rank calls it, in the same order with the engine's other calls.
class TESSERA_API ShardedState {
 public:
  ShardedState(const ShardedState&) = delete;
  ShardedState& operator=(const ShardedState&) = delete;

  /// Selects parameters; empty: all.
  using ParameterFilter = std::function<bool(const Parameter&)>;
  /// Writes elements `range` of a parameter to `out`, in host memory.
  using ParameterLoader = std::function<void(const Parameter&, ElementRange range, float* out)>;
  /// Receives a parameter and all its values.
  using ParameterVisitor = std::function<void(const Parameter& parameter, std::span<const float> values)>;
  /// Writes elements `range` of optimizer state `state`, counted from 0, to `out`, in host memory.
  using OptimizerLoader = std::function<void(const Parameter&, int state, ElementRange range, float* out)>;

  /// Sets initial values from the Init of parameters and buffers, each rank its own shard; clears the optimizer.
  void initialize(std::uint64_t seed);
  /// The same as initialize(seed), but `own` fills the parameters that are `wanted`, in the ranges that this rank
  /// holds.
  void initialize(std::uint64_t seed, const ParameterLoader& own, const ParameterFilter& wanted);
  /// Sets values from another source: `fill` is called for ranges of parameters and writes them to the host memory
  /// passed to it. Only parameters that are `wanted` (empty: all).
  void load(const ParameterLoader& fill, const ParameterFilter& wanted = {});
  /// Sets all ranks to the values of rank `from`: `fill` is called on that rank only, for whole parameters; buffers are
  /// broadcast. Needs host memory for one unit. Collective.
  void broadcast_from(int from, const ParameterLoader& fill, const ParameterFilter& wanted = {});

  /// The parameters of all units.
  std::vector<std::shared_ptr<Parameter>> parameters() const;
  /// Visits every full parameter, in byte order of the names, on every rank: of half-precision parameters the f32
  /// master weights, of encodings the bytes as numbers (load() and checkpoints do the same). The data is in host memory
  /// and valid during the call. Waits. Collective.
  void for_each_parameter(const ParameterVisitor& visitor);
  /// Visits the sharded state that this rank saves: 1/n of every parameter (its f32 master weights where they exist)
  /// and of the optimizer state. All ranks together cover each element exactly once. Ranges count a parameter's own
  /// elements. `data` is valid during the call; device data is in the order of the compute stream. Not collective.
  void for_each_shard(const std::function<void(const ShardRange&)>& visitor);

  /// The same as load(), for optimizer states. Each rank sets every range that it holds.
  void load_optimizer_state(const OptimizerLoader& fill, const ParameterFilter& wanted = {});
  /// Number of optimizer states per element of a trainable parameter.
  int optimizer_slots() const;
  /// The step after which training of a parameter began: 0, unless Engine::apply_requires_grad() unfroze it. Its
  /// optimizer counts from there.
  std::uint64_t trained_since(const Parameter& parameter) const;
  /// Sets trained_since() of every parameter, for restore().
  void set_trained_since(const std::function<std::uint64_t(const Parameter&)>& step);

  /// Sets the step counters as if `steps` steps had been made, of which `skipped` changed nothing: the next step has
  /// the following number. `apart` is replicas_apart() of the run that is resumed; without it, the replicas count as
  /// apart unless a sync period ends here. Throws InvalidUsage if `skipped` exceeds `steps`.
  void set_steps(std::uint64_t steps, std::uint64_t skipped = 0, std::optional<bool> apart = std::nullopt);
  /// Under a strategy with a sync period: the replicas have made steps since the last sync.
  bool replicas_apart() const;

  /// The buffers of the whole model. The engine owns their memory; they are not sharded or reduced.
  const std::vector<std::shared_ptr<ModuleBuffer>>& buffers() const;
  /// Sets buffers of this rank: `fill` writes a whole buffer to the host memory passed to it. Only buffers that are
  /// `wanted` (empty: all). Not collective.
  void load_buffers(const std::function<void(const ModuleBuffer&, void* out)>& fill,
                    const std::function<bool(const ModuleBuffer&)>& wanted = {});
  /// Makes the buffers of all ranks equal with BufferSync::maximum, as the next step would; else no effect. Collective.
  void synchronize_buffers();

  /// State that only this rank holds: f32, in device memory, in the order of the compute stream. It consists of the
  /// state of the collective plug-ins, named by collective, and with a sync period the replica's parameters and
  /// optimizer states. Not collective.
  std::vector<CollectivePlugin::State> plugin_state();
  /// Sets all plug-in state: `fill` writes the `count` values of each entry for this rank. Empty: resets it. Not
  /// collective.
  void load_plugin_state(const std::function<void(const CollectivePlugin::State&, int rank, float* out)>& fill);

 private:
  friend class Engine;
  explicit ShardedState(EngineCore& core) : core_(core) {}
  EngineCore& core_;
};

}  // namespace tessera::fsdp
