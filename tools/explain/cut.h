// How a model is cut: into units, which are used one after the other, and each unit into the shards that ranks keep.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/fsdp/flat_layout.h"
#include "tessera/fsdp/wrap.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// The ranks that keep one range of a flat parameter.
struct Shard {
  std::vector<int> ranks;
  fsdp::ElementRange range;           ///< in elements of the flat parameter
  std::vector<std::string> contents;  ///< parameters in the range, and how much of them
};

/// One unit of the model under the strategy that the engine applies to it.
struct CutUnit {
  std::string name;
  std::string contents;                  ///< its modules
  std::vector<std::string> first, last;  ///< its modules before and after the units inside it; of the root
  std::int64_t elements = 0, padded = 0;
  std::uint64_t bytes = 0;  ///< of the flat parameters: what a gather completes
  bool is_root = false;
  bool kept_after_forward = false;
  fsdp::Strategy strategy;
  std::vector<fsdp::FlatLayout> flats;
  /// The flat parameter that examples show: the largest.
  const fsdp::FlatLayout& largest() const;
};

/// The units of a plan's model. The model has no data.
class ModelCut {
 public:
  /// `step`: of the same plan.
  ModelCut(const TrainPlan& plan, const StepPlan& step);

  const std::vector<CutUnit>& units() const { return units_; }
  /// Throws std::out_of_range for an unknown name.
  const CutUnit& unit(const std::string& name) const;
  /// The unit that examples show: the first one that is not the root, if there is one.
  const CutUnit& example() const;
  std::int64_t elements() const;  ///< of all units, as are the following
  std::int64_t padded() const;
  std::uint64_t bytes() const;
  /// Modules that the root holds although only they use their parameters, each by its path.
  const std::vector<std::string>& needlessly_held() const { return needlessly_held_; }

 private:
  nn::Context context_;
  std::unique_ptr<nn::CausalModel> model_;
  std::vector<CutUnit> units_;
  std::vector<std::string> needlessly_held_;
};

/// In how many parts these axes of the mesh divide a flat parameter.
int parts_over(const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

/// The range of `padded` elements that a rank keeps of state that is sharded over `axes`.
fsdp::ElementRange shard_of(int rank, std::int64_t padded, const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

/// The shards of a unit's largest flat parameter over `axes`, in the order of their ranges.
std::vector<Shard> shards_of(const CutUnit& unit, const fsdp::Axes& axes, const fsdp::MeshShape& mesh);

}  // namespace tessera::tools
