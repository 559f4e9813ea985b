// tessera report: makes the page with pictures from files that `compare --json` wrote, or the postmortem of a run.
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/pages/page.h"
#include "tools/postmortem/postmortem.h"

namespace tessera::tools {
namespace {

struct ReportOptions {
  std::vector<std::string> files;
  std::string output;
  std::string postmortem;  // directory
  std::string json;
};

Comparison read_comparison(const std::string& path) {
  const base::FileText read = base::read_regular(path);
  if (!read.problem.empty())
    throw base::InvalidUsage("report: can't read '" + path + "': " + read.problem +
                             "; give a file that `tessera compare --json` wrote");
  return parse_comparison(base::parse_json<nlohmann::json>(read.text, "report: '" + path + "'"), path);
}

int run_report(const ReportOptions& options) {
  if (!options.postmortem.empty()) {
    print_postmortem(options.postmortem, options.json);
    return 0;
  }
  check_outputs({{"--output", options.output}}, options.files);
  std::vector<Comparison> comparisons;
  for (const std::string& file : options.files) comparisons.push_back(read_comparison(file));
  write_file(options.output, pages::page(comparisons));
  print_clean("wrote {}\n", options.output);
  return 0;
}

}  // namespace

void add_report(CommandLine& commands) {
  CLI::App* report = commands.app.add_subcommand(
      "report", "write an HTML page with charts of the results of compare, or explain a failure");
  const auto options = std::make_shared<ReportOptions>();
  CLI::Option* files = add_option(*report, "RUN.json", options->files, "result files of tessera compare --json");
  CLI::Option* output =
      add_option(*report, "-o,--output", options->output, "page to write; an existing file is replaced", "FILE.html");
  CLI::Option* postmortem =
      add_option(*report, "--postmortem", options->postmortem,
                 "print where the ranks of a run diverged, from the directory of its --flight-recorder", "DIR")
          ->excludes(files)
          ->excludes(output);
  add_option(*report, "--json", options->json, "with --postmortem: write it as JSON, too", "FILE")->needs(postmortem);
  report->callback([&commands, options, files, output] {
    if (options->postmortem.empty())
      for (const CLI::Option* needed : {files, output})
        if (needed->count() == 0) throw CLI::RequiredError(needed->get_name());
    commands.chosen = [options] { return run_report(*options); };
  });
}

}  // namespace tessera::tools
