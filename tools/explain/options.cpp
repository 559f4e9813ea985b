#include "tools/explain/options.h"

#include <algorithm>

namespace tessera::tools {

bool ExplainOptions::shows(const std::string& section) const {
  return sections.empty() || std::find(sections.begin(), sections.end(), section) != sections.end();
}

void add_explain_options(CLI::App& command, ExplainOptions& options) {
  add_step_options(command, options);
  add_world_options(command, options, options);
  add_strategy_option(command, options);
  add_cluster_options(command, options);
  command.add_option("--section", options.sections, "sections to show: cut, rest, step, cost, values, questions")
      ->type_name("A,B")
      ->delimiter(',')
      ->check(CLI::IsMember(kExplainSections));
  command.add_option("--question", options.question, "answer one question, or list them: list")->type_name("NAME|list");
  command.add_flag("--run", options.run,
                   "run the step on real ranks too: show values of all ranks, and the times of this machine");
  command.add_option("--html", options.html, "write a page that plays the step: its map, timelines and memory")
      ->type_name("FILE.html");
  command.add_option("--json", options.json, "write the facts as JSON")->type_name("FILE");
}

}  // namespace tessera::tools
