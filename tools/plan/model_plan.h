// tessera plan --model: what a training step costs on a cluster, strategy by strategy, and with --scale on more ranks;
// with --advise which strategy and options to take, and why.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/plan/cluster_file.h"
#include "tools/plan/options.h"
#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// The plans of one world.
struct ModelPlan {
  std::string model;
  std::int64_t parameters = 0;
  int ranks = 1;
  std::string cluster;
  double memory_bytes = 0;  ///< of a rank; 0: not known
  std::vector<StepPlan> runs;
  std::string note;  ///< of the model's config.json
};

/// The cluster that the options name. Throws InvalidUsage if they contradict each other.
ClusterSpec cluster_of(const PlanOptions& options, int ranks);

/// The run of one wrapping on that cluster, without data. `untimed`: see StepOptions. Throws InvalidUsage.
TrainPlan train_plan(const PlanOptions& options, const std::string& wrap, int ranks, const ClusterSpec& cluster,
                     bool untimed = false);

/// Simulates every strategy with every wrapping. From the default list, a strategy that can't run is left out, and
/// `skipped` gets the reason. Throws InvalidUsage.
ModelPlan plan_model(const PlanOptions& options, int ranks, const ClusterSpec& cluster,
                     std::vector<std::string>* skipped);

std::string to_text(const ModelPlan& plan);
nlohmann::ordered_json to_json(const ModelPlan& plan);

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

/// One way to train the model.
struct Candidate {
  std::string strategy;
  StepOptions options;  ///< of its mesh, wrapping, resharding, prefetch, recomputation and accumulation
  StepPlan plan;

  double step_ms() const { return plan.result.step_ms_median; }
  double peak_bytes() const { return static_cast<double>(plan.result.peak_bytes.total_peak); }
  /// The options of train that select it: "--strategy fsdp --prefetch 2".
  std::string command_line() const;
};

/// The result of a search.
struct Advice {
  std::string model;
  std::int64_t parameters = 0;
  int ranks = 1;
  std::string cluster;
  double memory_bytes = 0;
  std::size_t tried = 0;
  std::vector<Candidate> pareto;     ///< fastest for their memory, by rising memory; all that fit
  std::vector<std::string> reasons;  ///< sentences about the fastest, which is the last of `pareto`

  bool has_room_for(const Candidate& one) const { return memory_bytes <= 0 || one.peak_bytes() <= memory_bytes; }
};

/// Simulates all combinations of strategy, mesh, wrapping, resharding, prefetch, activation checkpointing and
/// accumulation that this world and batch allow. Throws InvalidUsage if none fits in the memory, with the least that is
/// needed and a number of ranks that would do.
Advice advise(const PlanOptions& options, int ranks, const ClusterSpec& cluster);

std::string to_text(const Advice& advice);
nlohmann::ordered_json to_json(const Advice& advice);

}  // namespace tessera::tools
