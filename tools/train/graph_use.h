// Whether a training replays its steps as device graphs.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::tools {

struct TrainPlan;

enum class GraphUse : std::uint8_t {
  never,
  if_possible,  ///< without --graphs: a step that turns out not to be capturable runs as it would without graphs
  required      ///< --graphs: it ends the training
};

/// Why a device graph can't contain the steps of `plan`, with the remedy; "" if nothing is known against it.
std::string graph_obstacle(const TrainPlan& plan);

/// What --graphs or --no-graphs, or their absence, mean for `plan`. Throws InvalidUsage for --graphs with an obstacle.
GraphUse graph_use_of(const TrainPlan& plan);

}  // namespace tessera::tools
