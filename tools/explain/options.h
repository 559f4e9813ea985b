// The options of explain.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tools/plan/options.h"

namespace tessera::tools {

/// Those of a plan's step and cluster, of ranks that run, and what to show.
struct ExplainOptions : PlanOptions, WorldOptions {
  std::vector<std::string> sections;  ///< empty: all
  std::string question;               ///< a name, or "list"
  bool run = false;
  std::string html;  ///< file for the page

  bool shows(const std::string& section) const;
};

/// Adds them to the subcommand.
void add_explain_options(CLI::App& command, ExplainOptions& options);

}  // namespace tessera::tools
