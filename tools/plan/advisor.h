// tessera plan --advise: which strategy and options to take, and why.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/plan/model_plan.h"

namespace tessera::tools {

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
