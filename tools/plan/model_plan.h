// tessera plan --model: what a training step costs on a cluster, strategy by strategy.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/plan/cluster_file.h"
#include "tools/plan/step_plan.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// As given on the command line.
struct ModelPlanOptions : TrainOptions {
  std::vector<std::string> wraps;  ///< empty: only --wrap
  std::string cluster;             ///< a preset or a file; empty: --link
  std::string link = "20us,100MB/s";
  std::string link_intra;
  int hosts = 1;
  std::string machine = "50GFLOP/s,10GB/s";
  std::vector<int> scale;  ///< numbers of ranks
  bool advise = false;
  std::string memory;  ///< of a rank
};

/// The plans of one world.
struct ModelPlan {
  std::string model;
  std::int64_t parameters = 0;
  int ranks = 1;
  std::string cluster;
  double memory_bytes = 0;  ///< of a rank; 0: not known
  std::vector<StepPlan> runs;
};

/// The cluster that the options name. Throws InvalidUsage if they contradict each other.
ClusterSpec cluster_of(const ModelPlanOptions& options, int ranks);

/// Simulates every strategy with every wrapping. From the default list, a strategy that can't run is left out, and
/// `skipped` gets the reason. Throws InvalidUsage.
ModelPlan plan_model(const ModelPlanOptions& options, int ranks, const ClusterSpec& cluster,
                     std::vector<std::string>* skipped);

std::string to_text(const ModelPlan& plan);
nlohmann::ordered_json to_json(const ModelPlan& plan);

}  // namespace tessera::tools
