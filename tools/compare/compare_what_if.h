// The schedules that a report replays in settings that were not run.
#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tools/compare/compare_runs.h"
#include "tools/results/what_if.h"

namespace tessera::tools {

/// The arguments of plan for the same steps, without those of links, machine, ranks and batch; empty if the model comes
/// from files that plan doesn't read. `app` has parsed compare.
std::vector<std::string> plan_arguments(const CLI::App& app, const CompareOptions& options);

/// `runs` are those of `contestants`, with timelines. Nothing on devices, whose steps these schedules don't describe.
std::optional<WhatIf> what_if_of(const std::vector<Contestant>& contestants, const std::vector<RunResult>& runs);

}  // namespace tessera::tools
