// Setting and reading the state of one parameter group.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <vector>

#include "tessera/fsdp/engine/param_group.h"
#include "tessera/fsdp/sharded_state.h"

namespace tessera::fsdp {

/// The f32 master weights of half-precision parameters are authoritative: they are written first, and are what is read.
class TESSERA_API GroupState {
 public:
  /// `resources` and `group` outlive the object.
  GroupState(EngineResources& resources, ParamGroup& group) : resources_(resources), group_(group) {}
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  /// Sets initial values from the parameters' Init; appended to the compute stream.
  void initialize(std::uint64_t seed);
  /// Sets the parameters at rest, each rank its own ranges. Waits for the compute stream.
  void load(const ShardedState::ParameterLoader& fill, const ShardedState::ParameterFilter& wanted);
  /// See ShardedState.
  void load_optimizer_state(const ShardedState::OptimizerLoader& fill, const ShardedState::ParameterFilter& wanted);
  void for_each_shard(const std::function<void(const ShardRange&)>& visitor) const;

  /// Prepares download(): gathers the master weights, or the parameters if there are none. Collective.
  void gather_full();
  /// Passes all elements in host memory to `visitor`, in f32, of an encoding the bytes as numbers; valid during the
  /// call. May be called until release_full(). Waits.
  void download(const Parameter& parameter, const std::function<void(std::span<const float>)>& visitor);
  void release_full();

  /// Of each parameter in host memory: all values, then each optimizer state.
  using FullState = std::map<const Parameter*, std::vector<std::vector<float>>>;
  FullState download_all();              ///< collective; waits
  void load_all(const FullState& full);  ///< sets the ranges that this rank holds; states where `full` has some

 private:
  void write(bool offloaded, void* at, std::size_t bytes, const std::function<void(void* device)>& produce);
  void load_values(FlatParameter& flat, const FlatEntry& entry, const ShardedState::ParameterLoader& fill);
  void load_half(FlatParameter& flat, const FlatEntry& entry, const ShardedState::ParameterLoader& fill);
  void load_bytes(const Parameter& parameter, ElementRange range, const ShardedState::ParameterLoader& fill, void* at);
  void gather_optimized(FlatParameter& flat, const float* shard);
  void gather_exactly(FlatParameter& flat);

  EngineResources& resources_;
  ParamGroup& group_;
};

}  // namespace tessera::fsdp
