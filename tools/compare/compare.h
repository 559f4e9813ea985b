// The runs of compare, each strategy and wrapping in ranks of its own, round by round; and what compare simulates of
// them: why one is slower than another and what would help (--why), and the schedules that a report replays in settings
// that were not run.
#pragma once

#include <CLI/CLI.hpp>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/cli/commands.h"
#include "tools/plan/planned_why.h"
#include "tools/results/comparison.h"

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

/// Has the runs of `plan` record what they wait for: over the links of --link, or without it over those that are there,
/// which are then measured. Throws InvalidUsage for devices other than the cpu.
void record_waits(TrainPlan& plan);

/// Of runs without --link: the median of what they measured, which gives each of them volume and latency. What a wait
/// took after the last rank had called is then all `exposed`: the fit doesn't say when the links had passed it.
comm::SlowLinks apply_link_fits(const std::vector<RunResult*>& runs);

/// Why the second of the measured runs is slower. `parts`: of each by round. The machine of the simulations that say
/// what would help is calibrated by these.
Why measured_why(const PlannedRun& from, const PlannedRun& to,
                 const std::pair<std::vector<StepParts>, std::vector<StepParts>>& parts, const comm::SlowLinks& links);

/// The arguments of plan for the same steps, without those of links, machine, ranks and batch; empty if the model comes
/// from files that plan doesn't read. `app` has parsed compare.
std::vector<std::string> plan_arguments(const CLI::App& app, const CompareOptions& options);

/// compare --programs: programs that train the same model in their own ways, side by side. Runs each of
/// options.programs ("NAME=PROGRAM ARGUMENTS") as ranks, which print their result as docs/programs.md describes, and
/// compares them with the first. `command` has parsed compare. Returns the exit code. Throws InvalidUsage for options
/// that are the trainings' of this tool, and for programs without a result.
int compare_programs(const CLI::App& command, const CompareOptions& options);

/// `runs` are those of `contestants`, with timelines. Nothing on devices, whose steps these schedules don't describe.
std::optional<WhatIf> what_if_of(const std::vector<PlannedRun>& contestants, const std::vector<RunResult>& runs);

}  // namespace tessera::tools
