// The command line: parses, runs the chosen subcommand, and turns errors into one line and an exit code.
// 0 done; 1 the work failed; 2 wrong usage or input.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <exception>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/registry.h"
#include "tools/cli/commands.h"
#include "tools/cli/output.h"
#include "tools/cli/validators.h"
#include "tools/launch/launcher.h"
#include "tools/launch/process.h"
#include "tools/launch/rank_watch.h"
#include "tools/launch/ranks.h"
#include "tools/version.h"

namespace tessera::tools {
namespace {

void say(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  std::fflush(stdout);
  print_clean(stderr, "tessera: {}\n", text);
}

std::string names_of(const CLI::App& app) {
  return joined_by(each_of(app.get_subcommands({}), [](const CLI::App* command) { return command->get_name(); }), " ");
}

int usage_error(const CommandLine& commands, const std::string& text) {
  std::string help = "tessera --help";
  for (const CLI::App* command : commands.app.get_subcommands()) help = "tessera " + command->get_name() + " --help";
  say(text + "; see " + help);
  return 2;
}

/// The exit code, if everything that was printed could be written.
int written(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  say("can't write standard output");
  return 1;
}

int parse(CommandLine& commands) {
  CLI::App& app = commands.app;
  if (commands.arguments.empty()) return usage_error(commands, "no subcommand given; known: " + names_of(app));
  const std::string& first = commands.arguments.front();
  const auto all = app.get_subcommands({});
  const bool known = std::ranges::any_of(all, [&](const CLI::App* command) { return command->get_name() == first; });
  if (!first.starts_with('-') && !known)
    return usage_error(commands, "unknown subcommand '" + first + "'; known: " + names_of(app));
  // Arguments after the first -- of `run` belong to the program and are not parsed.
  const auto end =
      first == "run" ? std::find(commands.arguments.begin(), commands.arguments.end(), "--") : commands.arguments.end();
  try {
    if (end != commands.arguments.end()) commands.program.assign(end + 1, commands.arguments.end());
    std::vector<std::string> reversed(std::make_reverse_iterator(end),
                                      commands.arguments.rend());  // the order that CLI11 expects
    app.parse(reversed);
    refuse_repeated_values(app);
  } catch (const CLI::Success& done) {  // --help, --version
    return written(app.exit(done));
  } catch (const CLI::ParseError& error) {
    const bool no_program = first == "run" && end == commands.arguments.end();
    return usage_error(commands, error.what() + std::string(no_program ? "; write -- before the program" : ""));
  }
  return -1;
}

/// A world of one if the launcher's variables are invalid: the subcommand reports the error.
comm::Launch launch_or_none() {
  try {
    return comm::resolve_launch();
  } catch (const base::Error&) {
    return {};
  }
}

/// True for a rank of this tool's launcher. A user who starts ranks by hand has no reason to set TESSERA_LAUNCHER.
bool started_by_us() { return comm_variable("TESSERA_LAUNCHER") == "tessera"; }

/// The library names its own options in errors; here they have the names of the command line.
std::string with_option_names(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {
      {"wrap ", "--wrap "}, {"wrap: ", "--wrap: "}, {"mesh ", "--mesh "}};
  for (const auto& [name, option] : kNames)
    if (text.starts_with(name)) text.replace(0, name.size(), option);
  constexpr std::string_view kMesh = "give a mesh RxS";
  if (const std::size_t at = text.find(kMesh); at != std::string::npos)
    text.replace(at, kMesh.size(), "give --mesh RxS");
  return text;
}

/// The last line for an error. Ranks of another launcher share one terminal, so each adds its rank, as this tool's
/// launcher would. Wrong usage concerns all ranks.
std::string last_line(const std::string& text, bool wrong_usage) {
  const comm::Launch launch = launch_or_none();
  if (wrong_usage || launch.size == 1 || started_by_us()) return text;
  return "rank " + std::to_string(launch.rank) + ": " + text;
}

int code_of(const base::Error& error) {
  if (error.kind() == "InvalidUsage") return 2;
  const bool through_others = error.kind() == "PeerLost" || error.kind() == "Aborted";
  return through_others && started_by_us() ? kOtherRankFailed : 1;
}

/// A misspelled variable would have no effect without notice.
void warn_of_unknown_variables() {
  std::vector<std::string> unknown = base::unknown_variables(all_variables());
  if (unknown.empty()) return;
  for (const comm::BackendState& backend : comm::list_backends())  // it may be a module's; asking them takes a while
    for (const comm::ModuleVariable& known : backend.variables) std::erase(unknown, known.name);
  for (const std::string& name : unknown)
    say("warning: " + name + " is not a variable of this program; see tessera info --env");
}

int run(const CommandLine& commands) {
  try {
    return written(commands.chosen());
  } catch (const base::Error& error) {
    say(last_line(with_option_names(error.what()), error.kind() == "InvalidUsage"));
    return code_of(error);
  } catch (const std::bad_alloc&) {
    say(last_line("out of memory", false));
  } catch (const std::exception& error) {
    say(last_line(error.what(), false));
  }
  return 1;
}

/// True if a launcher reports what stopped the ranks.
bool has_a_launcher() { return started_by_us() || launch_or_none().size > 1; }

/// Under a prefix, this tool's launcher runs above mpirun and knows more.
comm::Launch launch_to_guard() { return launch_socket() ? comm::Launch{} : launch_or_none(); }

int main_of(std::vector<std::string> arguments) {
  CLI::App app("Data-parallel training of one model under DDP, ZeRO, FSDP and HSDP, on one engine.", "tessera");
  app.set_version_flag("--version", std::string("tessera ") + kVersion);
  app.require_subcommand(1);
  app.footer("Exit codes: 0 done, 1 the work failed, 2 wrong usage or input. More: tessera SUBCOMMAND --help");
  CommandLine commands{app, std::move(arguments), {}, {}};
  add_bench(commands);
  add_checkpoint(commands);
  add_compare(commands);
  add_train(commands);
  add_plan(commands);
  add_explain(commands);
  add_info(commands);
  add_doctor(commands);
  add_run(commands);
  add_report(commands);
  refuse_empty_values(app);
  const int code = parse(commands);
  if (code >= 0) return code;
  if (launch_or_none().rank == 0 && !started_by_us())  // this tool's launcher has done it for its ranks
    warn_of_unknown_variables();
  // A write beyond the file size limit then fails as on a full disk, and its error is reported. The programs of `run`
  // would inherit this setting.
  if (!app.got_subcommand("run")) std::signal(SIGXFSZ, SIG_IGN);
  return run(commands);
}

rlim_t limit_of(__rlimit_resource resource) {
  rlimit limit{};
  return ::getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

/// Ends the process without the handlers of libraries if its address space is limited: OpenBLAS's waits for its
/// threads, and they for memory, perhaps for ever.
int end_with(int code) {
  if (limit_of(RLIMIT_AS) == RLIM_INFINITY) return code;
  std::fflush(nullptr);
  ::_exit(code);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  using namespace tessera::tools;
  tessera::base::open_closed_streams();
  constexpr rlim_t kLeastStack = rlim_t{128} << 10U;
  if (limit_of(RLIMIT_STACK) < kLeastStack) {
    print_clean(stderr, "tessera: the stack is limited to {} kB; allow 128 kB or more (ulimit -s 8192)\n",
                limit_of(RLIMIT_STACK) >> 10U);
    return end_with(2);
  }
  try {
    if (!has_a_launcher()) say_what_stops_us();
    static const auto launcher = connect_to_launcher();  // lives until the process ends
    static const auto guard = connect_to_guard(launch_to_guard());
    const int code = main_of({argv + 1, argv + argc});
    launcher.send("end " + std::to_string(code) + "\n");
    guard.send(code == 0 ? "e" : "f");
    return end_with(code);
  } catch (const std::exception& error) {
    print_clean(stderr, "tessera: {}\n", error.what());
  }
  return end_with(1);
}
