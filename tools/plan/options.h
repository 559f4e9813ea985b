// The options of plan.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/plan/all_ranks.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// Those of a step, and what it is planned for.
struct PlanOptions : StepOptions, LinkOptions {
  PlanOptions() { link = "20us,100MB/s"; }

  std::string parameters;  ///< of a model without layers: the ZeRO table
  std::vector<std::string> rank_counts = {"4"};
  std::string cluster;  ///< a preset, a file, or "list"; empty: that of --link and --machine
  std::string machine = "50GFLOP/s,10GB/s";
  std::vector<std::string> wraps;  ///< empty: only --wrap
  std::vector<std::string> scale;  ///< numbers of ranks
  std::vector<std::string> why;    ///< empty, or two runs
  bool advise = false;
  std::string memory;                   ///< of a rank; empty: the cluster's
  std::vector<std::string> slow_ranks;  ///< RANK:FACTOR
  std::vector<std::string> slow_links;  ///< HOST:FACTOR
  double jitter_percent = 0;
  std::string json, trace, report;  ///< files
};

/// Adds the options of the machines that are simulated.
void add_cluster_options(CLI::App& command, PlanOptions& options);

/// Adds them to the subcommand.
void add_plan_options(CLI::App& command, PlanOptions& options);

/// The option's numbers of ranks, in the order given. Throws InvalidUsage.
std::vector<int> ranks_of(const PlanOptions& options);
std::vector<int> scale_of(const PlanOptions& options);

/// How ranks differ, or nothing if they are equal. Throws InvalidUsage.
std::optional<plan::Variation> variation_of(const PlanOptions& options);

/// Throws InvalidUsage if an option is given that is not in `used`: it would have no effect with `what`.
void refuse_other_options(const CLI::App& command, const std::string& what, const std::vector<std::string>& used);

}  // namespace tessera::tools
