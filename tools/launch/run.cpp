// tessera run: starts a program of the user as ranks on this host.
#include <filesystem>
#include <memory>
#include <system_error>

#include "tessera/base/error.h"
#include "tools/cli/commands.h"
#include "tools/cli/validators.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

struct ProgramOptions {
  int ranks = 4;
  bool no_tag = false;
  std::string bind = "none";
  std::string log_dir;
  std::vector<std::string> program;
};

/// A backend that can't be used is not an error.
void set_prefix_of_program(LaunchSpec& plan) {
  if (!comm_variable("TESSERA_BACKEND")) return;
  try {
    set_prefix(plan, "");
  } catch (const base::InvalidUsage&) {  // the program may not need it
  }
}

int run_program(const ProgramOptions& options) {
  if (options.program.empty())
    throw base::InvalidUsage("run: no program given; write: tessera run -n 4 -- PROGRAM ARGS");
  LaunchSpec plan{.ranks = options.ranks, .command = options.program, .tag = !options.no_tag};
  plan.bind_to_cores = options.bind == "core";
  set_prefix_of_program(plan);
  if (!plan.prefix.empty() && (plan.tag || plan.bind_to_cores))
    throw base::InvalidUsage("run: the ranks of backend " + default_backend() + " are started by " +
                             plan.prefix.front() +
                             ", which binds and names them its own way; give --no-tag and leave --bind out");
  if (!options.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.log_dir, error);
    if (error) throw base::InvalidUsage("--log-dir: can't create '" + options.log_dir + "': " + error.message());
    plan.log_dir = options.log_dir;
  }
  return launch(plan);
}

}  // namespace

void add_run(CommandLine& commands) {
  CLI::App* run = commands.app.add_subcommand("run", "start a program as ranks on this host");
  const auto options = std::make_shared<ProgramOptions>();
  add_option(*run, "-n,--ranks", options->ranks, "number of ranks", whole_number(1, 1024));
  run->add_flag("--no-tag", options->no_tag, "no [rank] before each line; the program inherits standard output");
  add_option(*run, "--bind", options->bind, "cores of ranks: core: each gets an equal share; none: all may use all",
             one_of({"core", "none"}));
  add_option(*run, "--log-dir", options->log_dir, "also write each rank's output to DIR/rank-R.log", "DIR");
  run->footer(
      "Write: tessera run -n 4 -- PROGRAM ARGS\n"
      "The ranks find TESSERA_RANK, TESSERA_WORLD_SIZE, TESSERA_LOCAL_RANK and TESSERA_LOCAL_WORLD_SIZE in their\n"
      "environment. When one fails the others are stopped; the last line names the first that failed.");
  run->callback([&commands, options] {
    options->program = commands.program;
    commands.chosen = [options] { return run_program(*options); };
  });
}

}  // namespace tessera::tools
