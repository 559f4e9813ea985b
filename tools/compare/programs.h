// compare --programs: programs that train the same model in their own ways, side by side.
#pragma once

#include <CLI/CLI.hpp>

#include "tools/compare/compare.h"

namespace tessera::tools {

/// Runs each of options.programs ("NAME=PROGRAM ARGUMENTS") as ranks, which print their result as docs/programs.md
/// describes, and compares them with the first. `command` has parsed compare. Returns the exit code. Throws
/// InvalidUsage for options that are the trainings' of this tool, and for programs without a result.
int compare_programs(const CLI::App& command, const CompareOptions& options);

}  // namespace tessera::tools
