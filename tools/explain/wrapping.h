// How a model is wrapped into units, which are used one after the other, and each unit sharded over the ranks.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/training_task.h"
#include "tessera/fsdp/wrap.h"
#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// The ranks that keep one range of a flat parameter.
struct Shard {
  std::vector<int> ranks;
  fsdp::ElementRange range;           ///< in elements of the flat parameter
  std::vector<std::string> contents;  ///< parameters in the range, and how much of them
};

/// One unit of the model, and the strategy that the engine applies to it.
struct WrappedUnit {
  std::string name;
  std::string contents;                  ///< its modules
  std::vector<std::string> first, last;  ///< the root's modules before and after the units inside it
  std::int64_t elements = 0, padded = 0;
  std::uint64_t bytes = 0;  ///< the flat parameters when unsharded
  bool is_root = false;
  bool kept_after_forward = false;
  fsdp::Strategy strategy;
  std::vector<fsdp::FlatLayout> flats;
  /// The flat parameter that examples show: the largest.
  const fsdp::FlatLayout& largest() const;
};

/// The units of a plan's model. The model has no data.
class Wrapping {
 public:
  /// `step`: of the same plan.
  Wrapping(const TrainPlan& plan, const StepPlan& step);

  const std::vector<WrappedUnit>& units() const { return units_; }
  /// Throws std::out_of_range for an unknown name.
  const WrappedUnit& unit(const std::string& name) const {
    for (const WrappedUnit& unit : units_)
      if (unit.name == name) return unit;
    throw std::out_of_range("no unit " + name);
  }
  /// The unit that examples show: the first one that is not the root, if there is one.
  const WrappedUnit& example() const {
    for (const WrappedUnit& unit : units_)
      if (!unit.is_root) return unit;
    return units_.front();
  }
  std::int64_t padded() const { return padded_; }  ///< the sum over all units, as below
  std::uint64_t bytes() const { return bytes_; }
  bool encoded() const { return encoded_; }  ///< some elements encode parameters in 4 bits, two in each
  /// Modules that the root holds although only they use their parameters, each by its path.
  const std::vector<std::string>& needlessly_held() const { return needlessly_held_; }

 private:
  nn::Context context_;
  std::unique_ptr<fsdp::TrainingTask> task_;
  std::vector<WrappedUnit> units_;
  std::int64_t padded_ = 0;
  std::uint64_t bytes_ = 0;
  bool encoded_ = false;
  std::vector<std::string> needlessly_held_;
};

/// The range of `padded` elements that a rank keeps of state that is sharded over `axes`.
fsdp::ElementRange shard_of(int rank, std::int64_t padded, const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

/// The shards of a unit's largest flat parameter over `axes`, in the order of their ranges.
std::vector<Shard> shards_of(const WrappedUnit& unit, const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

}  // namespace tessera::tools
