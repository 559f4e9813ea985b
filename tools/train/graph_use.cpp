#include "tools/train/graph_use.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tools/train/plan.h"

namespace tessera::tools {

std::string graph_obstacle(const TrainPlan& plan) {
  const TrainOptions& o = plan.options;
  const nn::ModelConfig& m = plan.model;
  for (const auto& [stands, what] : {
           std::pair(plan.task.has_value(), std::string("the model is of a plug-in file, whose steps may differ")),
           {base::parse_device(o.device).type == base::DeviceType::cpu,
            "device " + o.device + " has no graphs; use --device cuda"},
           {plan.ranks > 1,
            std::to_string(plan.ranks) + " ranks wait for each other on several streams; use --ranks 1"},
           {m.embedding_dropout > 0 || m.residual_dropout > 0 || m.attention_dropout > 0,
            "the model has dropout, whose masks change with every step; set it to 0"},
           {o.accumulate > 1, "--accumulate changes what a backward does with gradients; leave one of the two out"},
           {o.precision == "f16", "the loss scale of f16 changes from step to step; use bf16"},
           {o.cpu_offload, "--cpu-offload copies parameters on another stream; leave one of the two out"},
           {plan.precision.casts(), "--reduce-dtype " + o.reduce_dtype + " converts gradients; leave it out"},
           {!o.trace.empty(), "a replayed graph has no events for --trace; leave one of the two out"},
           {!o.report.empty(), "a replayed graph has no events for --report; leave one of the two out"},
       })
    if (stands) return what;
  return "";
}

GraphUse graph_use_of(const TrainPlan& plan) {
  const std::optional<bool>& wanted = plan.options.graphs;
  if (wanted == false) return GraphUse::never;
  const std::string obstacle = graph_obstacle(plan);
  if (obstacle.empty()) return wanted ? GraphUse::required : GraphUse::if_possible;
  if (wanted) throw base::InvalidUsage("--graphs: " + obstacle);
  return GraphUse::never;
}

}  // namespace tessera::tools
