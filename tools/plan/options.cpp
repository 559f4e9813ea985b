#include "tools/plan/options.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

void add_plan_options(CLI::App& command, PlanOptions& options) {
  add_step_options(command, options);
  command
      .add_option("--parameters", options.parameters,
                  "print the ZeRO table: the model state per rank for this number of parameters, such as 7.5e9 or 7.5B")
      ->type_name("N");
  command.add_option("--ranks", options.rank_counts, "numbers of ranks; several only with --parameters (default: 4)")
      ->type_name("N[,N]")
      ->delimiter(',');
  command
      .add_option("--strategies,--strategy", options.strategies,
                  "strategies to plan, each as in train --strategy (default: all that can run)")
      ->type_name("A,B")
      ->delimiter(',');
  command
      .add_option(
          "--cluster", options.cluster,
          "the machines: a preset or a JSON file (docs/plan.md); list: the presets; alone with --json: writes it")
      ->type_name("NAME|FILE|list");
  command
      .add_option("--link", options.link,
                  "instead of --cluster: latency and rate of the link between any two ranks, or between hosts")
      ->type_name("LATENCY,RATE")
      ->capture_default_str()
      ->excludes("--cluster");
  command.add_option("--link-intra", options.link_intra, "with --link and --hosts: the link between ranks of one host")
      ->type_name("LATENCY,RATE")
      ->excludes("--cluster");
  command.add_option("--hosts", options.hosts, "with --link: hosts that the ranks divide into, in order (default: 1)")
      ->transform(whole_number(1, 1 << 20))
      ->excludes("--cluster");
  command
      .add_option("--machine", options.machine,
                  "with --link: rate of products and attention, and of memory for all other kernels")
      ->type_name("FLOPS,BYTES")
      ->capture_default_str()
      ->excludes("--cluster");
  command.add_option("--wraps", options.wraps, "wrappings to plan every strategy with, each as in --wrap")
      ->type_name("A,B")
      ->delimiter(',')
      ->excludes("--wrap");
  command.add_option("--json", options.json, "write the results as JSON")->type_name("FILE");
  command.add_option("--trace", options.trace, "write the simulated step as a Chrome trace, which Perfetto opens")
      ->type_name("FILE");
  command.add_option("--report", options.report, "write an HTML page with charts")->type_name("FILE.html");
  command.footer("With --parameters, --precision is bf16 unless it is given, as in the table of the ZeRO paper.");
}

std::vector<int> ranks_of(const PlanOptions& options) {
  std::vector<int> all;
  for (const std::string& count : options.rank_counts) {
    all.push_back(static_cast<int>(base::parse_integer(count, "--ranks", 1, 1 << 20)));
    if (std::count(all.begin(), all.end(), all.back()) > 1)
      throw base::InvalidUsage(fmt::format("--ranks: {} is given twice; once is enough", all.back()));
  }
  return all;
}

void refuse_other_options(const CLI::App& command, const std::string& what, const std::vector<std::string>& used) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    if (option->count() > 0 && std::find(used.begin(), used.end(), name) == used.end())
      throw base::InvalidUsage(fmt::format("{} has no effect with {}; leave it out", name, what));
  }
}

}  // namespace tessera::tools
