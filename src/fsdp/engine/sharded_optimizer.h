// The optimizer of a unit: updates the shard of the parameters whose optimizer state this rank holds.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "tessera/fsdp/engine/grad_reducer.h"
#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

/// Methods are asynchronous with respect to the host.
class TESSERA_API ShardedOptimizer {
 public:
  /// `resources`, `group` and `reducer` outlive the optimizer.
  ShardedOptimizer(EngineResources& resources, ParamGroup& group, const GradReducer& reducer);
  ShardedOptimizer(const ShardedOptimizer&) = delete;
  ShardedOptimizer& operator=(const ShardedOptimizer&) = delete;

  /// Updates with the reduced gradients. With CPU offload in chunks, which pass through the device.
  void update(const EngineOptions& options, const OptimizerStep& step);
  /// Zeroes the optimizer state. If it is offloaded, the engine must have waited for all work that uses it.
  void clear();
  /// Maximum device bytes for a chunk of the offloaded optimizer state.
  std::size_t chunk_bytes() const;

  /// See ShardedState::trained_since().
  std::uint64_t trained_since(const Parameter& parameter) const;
  void set_trained_since(const std::function<std::uint64_t(const Parameter&)>& step);
  /// Call before the group is laid out again: training of the newly trainable parameters begins after `steps` steps.
  void begin_training_of_unfrozen(std::uint64_t steps);
  void lay_out();  ///< call after the group was laid out

 private:
  /// Elements of a flat parameter of equal age, which are updated at once.
  struct UpdateRange {
    std::size_t flat;               // index in the group
    ElementRange range;             // within the flat parameter
    std::uint64_t since;            // step after which training of the range began
    std::vector<DecayRange> parts;  // their ends are within the flat parameter, too
  };
  void add_ranges(std::size_t flat);
  void update_by_program(const ProgramOptimizer& program, const OptimizerStep& step, std::size_t flat,
                         ElementRange chunk, const OptimizerRange& buffers);
  static std::vector<DecayRange> parts_within(const UpdateRange& all, ElementRange chunk);
  OptimizerRange buffers_of(std::size_t flat, ElementRange chunk);

  EngineResources& resources_;
  ParamGroup& group_;
  const GradReducer& reducer_;
  std::map<const Parameter*, std::uint64_t> trained_since_;  // parameters not listed: from the beginning
  std::vector<UpdateRange> ranges_;
};

}  // namespace tessera::fsdp
