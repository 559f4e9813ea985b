#include "tools/explain/options.h"

#include <algorithm>

#include "tools/cli/validators.h"

namespace tessera::tools {

bool ExplainOptions::shows(const std::string& section) const {
  const auto has = [&](const char* name) {
    return std::find(sections.begin(), sections.end(), name) != sections.end();
  };
  return sections.empty() || has(section.c_str()) || (section == "wrap" && has("cut"));
}

void add_explain_options(CLI::App& command, ExplainOptions& options) {
  add_step_options(command, options);
  add_world_options(command, options, options);
  add_strategy_option(command, options);
  add_cluster_options(command, options);
  add_option(command, "--section", options.sections, "sections to show: wrap, rest, step, cost, values, questions",
             // "cut" is the older name of "wrap".
             list_of("A,B", one_of({"wrap", "rest", "step", "cost", "values", "questions", "cut"})));
  add_option(command, "--question", options.question, "answer one question, or list them: list", "NAME|list");
  command.add_flag("--run", options.run,
                   "run the step on real ranks too: show values of all ranks, and the times of this machine");
  add_option(command, "--html", options.html, "write a page that plays the step: its map, timelines and memory",
             "FILE.html");
  add_option(command, "--json", options.json, "write the facts as JSON", "FILE");
}

}  // namespace tessera::tools
