// The runs of compare: each strategy and wrapping in ranks of its own, round by round.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tools/cli/commands.h"
#include "tools/plan/planned_why.h"

namespace tessera::tools {

/// As given on the command line.
struct CompareOptions : TrainOptions {
  std::vector<std::string> wraps;     ///< empty: only --wrap
  std::optional<std::size_t> repeat;  ///< rounds
  std::vector<std::string> why;       ///< empty, or two runs
  std::vector<std::string> programs;  ///< run instead of trainings of this tool

  std::size_t rounds() const { return repeat.value_or(why.empty() ? 1 : 6); }
  std::string only;       ///< set in the ranks: the strategy that this process runs
  std::string only_wrap;  ///< ... and its wrapping, if there are several
};

/// One run of one round.
struct CompareRun {
  RunResult result;
  std::string trace;
  std::string backend;  ///< the one that was used
};

/// Runs as a rank that this tool started; prints a line of JSON per step for its parent, and one with the result.
int run_as_child(const TrainPlan& plan, const CompareOptions& options);

/// All runs, round by round, in new processes or in the ranks of a launcher, of which this is one. Returns the exit
/// code; on 0 it has filled `results`, by contestant and round.
int run_rounds(const CommandLine& commands, const CompareOptions& options, const std::vector<PlannedRun>& contestants,
               int ranks, std::vector<std::vector<CompareRun>>& results);

}  // namespace tessera::tools
