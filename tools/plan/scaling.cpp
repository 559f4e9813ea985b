#include "tools/plan/scaling.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tools/cli/output.h"

namespace tessera::tools {

using nlohmann::ordered_json;

namespace {

/// The run of the smallest world with this strategy and wrapping, which the others are compared with.
const StepPlan* reference_of(const std::vector<ModelPlan>& plans, const RunResult& run, int& ranks) {
  for (const ModelPlan& plan : plans)
    for (const StepPlan& step : plan.runs)
      if (name_of(step.result) == name_of(run)) {
        ranks = plan.ranks;
        return &step;
      }
  return nullptr;
}

/// Tokens per second and rank, as a part of those in the smallest world.
double efficiency(const std::vector<ModelPlan>& plans, const ModelPlan& plan, const RunResult& run) {
  int ranks = plan.ranks;
  const StepPlan* first = reference_of(plans, run, ranks);
  return run.tokens_per_second / plan.ranks / (first->result.tokens_per_second / ranks);
}

std::string table_of(const std::vector<ModelPlan>& plans, const char* title) {
  std::vector<std::vector<std::string>> rows = {
      {"ranks", "strategy", "mesh", "step ms", "exposed", "tokens/s", "of ideal"}};
  for (const ModelPlan& plan : plans)
    for (const StepPlan& step : plan.runs) {
      const RunResult& run = step.result;
      rows.push_back({std::to_string(plan.ranks), name_of(run), fmt::format("{}x{}", run.mesh[0], run.mesh[1]),
                      fmt::format("{:.3f}", run.step_ms_median), fmt::format("{:.3f}", run.exposed_communication_ms),
                      fmt::format("{:.0f}", run.tokens_per_second),
                      fmt::format("{:.1f}%", 100 * efficiency(plans, plan, run))});
    }
  return std::string(title) + "\n" + text_table(rows);
}

ordered_json json_of(const std::vector<ModelPlan>& plans) {
  ordered_json all = ordered_json::array();
  for (const ModelPlan& plan : plans) {
    ordered_json one = to_json(plan);
    for (std::size_t i = 0; i < plan.runs.size(); ++i)
      one["runs"][i]["efficiency"] = efficiency(plans, plan, plan.runs[i].result);
    all.push_back({{"ranks", plan.ranks}, {"runs", std::move(one["runs"])}});
  }
  return all;
}

}  // namespace

Scaling plan_scaling(const PlanOptions& options, int ranks, const ClusterSpec& cluster) {
  std::vector<int> worlds = scale_of(options);
  worlds.push_back(ranks);
  std::sort(worlds.begin(), worlds.end());
  worlds.erase(std::unique(worlds.begin(), worlds.end()), worlds.end());
  Scaling scaling;
  for (const int world : worlds) {
    PlanOptions strong = options;
    strong.json.clear();  // no graphs
    PlanOptions weak = strong;
    weak.global_batch = options.global_batch / ranks * world;
    scaling.weak.push_back(plan_model(weak, world, cluster, nullptr));
    try {
      scaling.strong.push_back(plan_model(strong, world, cluster, nullptr));
    } catch (const base::InvalidUsage& error) {
      scaling.skipped.push_back(fmt::format("{} ranks: {}", world, error.what()));
    }
  }
  return scaling;
}

std::string to_text(const Scaling& scaling) {
  std::string text = table_of(scaling.weak, "weak scaling: the same batch per rank") +
                     table_of(scaling.strong, "strong scaling: the same global batch");
  for (const std::string& reason : scaling.skipped) text += "left out of strong scaling: " + reason + "\n";
  return text;
}

ordered_json to_json(const Scaling& scaling) {
  return {{"weak", json_of(scaling.weak)}, {"strong", json_of(scaling.strong)}, {"skipped", scaling.skipped}};
}

}  // namespace tessera::tools
