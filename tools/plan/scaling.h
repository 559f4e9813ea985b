// tessera plan --scale: the same step on more ranks.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/plan/model_plan.h"

namespace tessera::tools {

/// The plans of several worlds, in the order of their ranks.
struct Scaling {
  std::vector<ModelPlan> weak;       ///< with the batch per rank of --ranks
  std::vector<ModelPlan> strong;     ///< with the global batch of --ranks
  std::vector<std::string> skipped;  ///< why a world is not in `strong`
};

/// Plans --ranks and the worlds of --scale. A strategy of the default list that can't run on a world is left out there.
/// Throws InvalidUsage.
Scaling plan_scaling(const PlanOptions& options, int ranks, const ClusterSpec& cluster);

std::string to_text(const Scaling& scaling);
nlohmann::ordered_json to_json(const Scaling& scaling);

}  // namespace tessera::tools
