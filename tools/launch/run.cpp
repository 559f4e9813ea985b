// tessera run: starts a program of the user as ranks on this host, or on several through ssh.
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>

#include "tessera/base/error.h"
#include "tools/cli/commands.h"
#include "tools/cli/validators.h"
#include "tools/launch/host_connection.h"
#include "tools/launch/host_launcher.h"
#include "tools/launch/launcher.h"
#include "tools/launch/ranks.h"

namespace tessera::tools {
namespace {

constexpr int kLocalRanks = 4;
constexpr int kMaxLocalRanks = 1024;

struct ProgramOptions {
  std::optional<int> ranks;
  bool no_tag = false;
  bool as_host = false;  ///< the far side of --hosts
  HostOptions hosts;
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

std::optional<std::filesystem::path> made_log_dir(const ProgramOptions& options) {
  if (options.log_dir.empty()) return std::nullopt;
  std::error_code error;
  std::filesystem::create_directories(options.log_dir, error);
  if (error) throw base::InvalidUsage("--log-dir: can't create '" + options.log_dir + "': " + error.message());
  return options.log_dir;
}

int run_on_hosts(const ProgramOptions& options) {
  LaunchSpec local;
  set_prefix_of_program(local);
  if (!local.prefix.empty())
    throw base::InvalidUsage("run: the ranks of backend " + default_backend() + " are started by " +
                             local.prefix.front() + "; write: mpirun --hostfile FILE PROGRAM ARGS, without --hosts");
  HostLaunchSpec spec = host_launch_spec(options.hosts, options.ranks);
  spec.command = options.program;
  spec.tag = !options.no_tag;
  spec.bind_to_cores = options.bind == "core";
  spec.log_dir = made_log_dir(options);
  return launch_on_hosts(spec);
}

int run_program(const ProgramOptions& options) {
  if (options.as_host) return run_as_host();
  if (options.program.empty())
    throw base::InvalidUsage("run: no program given; write: tessera run -n 4 -- PROGRAM ARGS");
  if (options.hosts.given()) return run_on_hosts(options);
  LaunchSpec plan{.ranks = options.ranks.value_or(kLocalRanks), .command = options.program, .tag = !options.no_tag};
  plan.bind_to_cores = options.bind == "core";
  set_prefix_of_program(plan);
  if (!plan.prefix.empty() && (plan.tag || plan.bind_to_cores))
    throw base::InvalidUsage("run: the ranks of backend " + default_backend() + " are started by " +
                             plan.prefix.front() +
                             ", which binds and names them its own way; give --no-tag and leave --bind out");
  plan.log_dir = made_log_dir(options);
  return launch(plan);
}

}  // namespace

void add_run(CommandLine& commands) {
  CLI::App* run =
      commands.app.add_subcommand("run", "start a program as ranks on this host or, through ssh, on several");
  const auto options = std::make_shared<ProgramOptions>();
  add_option(*run, "-n,--ranks", options->ranks, "number of ranks; default: 4, or the hosts' slots",
             whole_number(1, kMaxLocalRanks));
  run->add_flag("--no-tag", options->no_tag, "no [rank] before each line; the program inherits standard output");
  add_option(*run, "--bind", options->bind, "cores of ranks: core: each gets an equal share; none: all may use all",
             one_of({"core", "none"}));
  add_option(*run, "--log-dir", options->log_dir, "also write each rank's output to DIR/rank-R.log", "DIR");
  add_host_options(*run, options->hosts);
  run->add_flag("--as-host", options->as_host)->group("");  // what --hosts runs on each host
  run->footer(
      "Write: tessera run -n 4 -- PROGRAM ARGS, or tessera run --hosts a:2,b:2 -- PROGRAM ARGS\n"
      "The ranks find TESSERA_RANK, TESSERA_WORLD_SIZE, TESSERA_LOCAL_RANK and TESSERA_LOCAL_WORLD_SIZE in their\n"
      "environment. When one fails the others are stopped; the last line names the first that failed.");
  run->callback([&commands, options] {
    options->program = commands.program;
    commands.chosen = [options] { return run_program(*options); };
  });
}

}  // namespace tessera::tools
