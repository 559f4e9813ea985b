#include "tools/plan/options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tools/cli/validators.h"

namespace tessera::tools {
namespace {

std::vector<int> numbers_of(const std::vector<std::string>& texts, const char* option) {
  std::vector<int> all;
  for (const std::string& count : texts) {
    all.push_back(static_cast<int>(base::parse_integer(count, option, 1, 1 << 20)));
    if (std::ranges::count(all, all.back()) > 1)
      throw base::InvalidUsage(fmt::format("{}: {} is given twice; once is enough", option, all.back()));
  }
  return all;
}

/// "3:1.5" of an option.
std::map<int, double> factors_of(const std::vector<std::string>& texts, const char* option) {
  std::map<int, double> factors;
  for (const std::string& text : texts) {
    const std::size_t colon = text.find(':');
    if (colon == std::string::npos)
      throw base::InvalidUsage(fmt::format("{}: '{}' is not NUMBER:FACTOR; write 3:1.5", option, text));
    const auto number = static_cast<int>(base::parse_integer(text.substr(0, colon), option, 0, 1 << 20));
    const std::string factor = text.substr(colon + 1);
    double value = 0;
    const auto [stop, error] = std::from_chars(factor.data(), factor.data() + factor.size(), value);
    if (error != std::errc() || stop != factor.data() + factor.size() || !(value >= 0.01) || value > 1e6)
      throw base::InvalidUsage(fmt::format("{}: '{}' is not a factor from 0.01 to 1e6", option, factor));
    if (!factors.emplace(number, value).second)
      throw base::InvalidUsage(fmt::format("{}: {} is given twice; once is enough", option, number));
  }
  return factors;
}

}  // namespace

void add_cluster_options(CLI::App& command, PlanOptions& options) {
  add_option(command, "--cluster", options.cluster,
             "the machines: a preset or a JSON file (docs/plan.md); list: the presets; alone with --json: writes it",
             "NAME|FILE|list");
  add_option(command, "--link", options.link,
             "instead of --cluster: latency and rate of the link between any two ranks, or between hosts",
             "LATENCY,RATE")
      ->excludes("--cluster");
  add_option(command, "--link-intra", options.link_intra, "with --link and --hosts: the link between ranks of one host",
             "LATENCY,RATE")
      ->excludes("--cluster");
  add_option(command, "--hosts", options.hosts, "with --link: hosts that the ranks divide into, in order (default: 1)",
             whole_number(1, 1 << 20))
      ->excludes("--cluster");
  add_option(command, "--machine", options.machine,
             "with --link: rate of products and attention, and of memory for all other kernels; or the ranks of a "
             "cluster, such as a file of bench --cluster",
             "FLOPS,BYTES|CLUSTER")
      ->excludes("--cluster");
}

void add_plan_options(CLI::App& command, PlanOptions& options) {
  add_step_options(command, options);
  add_option(command, "--parameters", options.parameters,
             "print the ZeRO table: the model state per rank for this number of parameters, such as 7.5e9 or 7.5B",
             "N");
  add_option(command, "--ranks", options.rank_counts, "numbers of ranks; several only with --parameters (default: 4)",
             list_of("N[,N]"));
  add_option(command, "--strategies,--strategy", options.strategies,
             "strategies to plan, each as in train --strategy (default: all that can run)", list_of());
  add_cluster_options(command, options);
  add_option(command, "--wraps", options.wraps, "wrappings to plan every strategy with, each as in --wrap", list_of())
      ->excludes("--wrap");
  add_option(command, "--scale", options.scale,
             "also plan these numbers of ranks: with the batch per rank of --ranks (weak scaling) and with the "
             "same global batch (strong scaling)",
             list_of("N[,N]"));
  add_option(command, "--why", options.why,
             "with --link: print why a step of B takes longer than one of A, as a sum, and what would help", list_of())
      ->excludes("--cluster");
  command.add_flag("--advise", options.advise,
                   "search strategies and options, show the fastest for their memory and say why");
  add_option(command, "--memory", options.memory,
             "memory of a rank for --advise, such as 80GB (default: the cluster's)", "BYTES");
  add_option(command, "--slow-rank", options.slow_ranks,
             "simulate all ranks, with the work of one taking FACTOR times as long", list_of("RANK:FACTOR[,..]"));
  add_option(command, "--slow-link", options.slow_links,
             "simulate all ranks, with the bytes of one host's cards taking FACTOR times as long",
             list_of("HOST:FACTOR[,..]"));
  add_option(command, "--jitter", options.jitter_percent,
             "simulate all ranks, with tasks that take longer by this many percent of their time (one deviation)",
             {"PERCENT", finite_number(0)})
      ->default_str("");
  add_option(command, "--json", options.json, "write the results as JSON", "FILE");
  add_option(command, "--trace", options.trace, "write the simulated step as a Chrome trace, which Perfetto opens",
             "FILE");
  add_option(command, "--report", options.report, "write an HTML page with charts", "FILE.html");
  command.footer("With --parameters, --precision is bf16 unless it is given, as in the table of the ZeRO paper.");
}

std::vector<int> ranks_of(const PlanOptions& options) { return numbers_of(options.rank_counts, "--ranks"); }

std::vector<int> scale_of(const PlanOptions& options) { return numbers_of(options.scale, "--scale"); }

std::optional<plan::Variation> variation_of(const PlanOptions& options) {
  if (options.slow_ranks.empty() && options.slow_links.empty() && options.jitter_percent == 0) return {};
  return plan::Variation{.slow_ranks = factors_of(options.slow_ranks, "--slow-rank"),
                         .slow_hosts = factors_of(options.slow_links, "--slow-link"),
                         .jitter = options.jitter_percent / 100};
}

void refuse_other_options(const CLI::App& command, const std::string& what, const std::vector<std::string>& used) {
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_name();
    if (option->count() > 0 && std::ranges::find(used, name) == used.end())
      throw base::InvalidUsage(fmt::format("{} has no effect with {}; leave it out", name, what));
  }
}

}  // namespace tessera::tools
