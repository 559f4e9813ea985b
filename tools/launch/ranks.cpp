#include "tools/launch/ranks.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/bootstrap/rendezvous_file.h"
#include "tessera/comm/init.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/registry.h"
#include "tessera/nn/attention_library.h"
#include "tessera/nn/products.h"
#include "tessera/nn/variables.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

constexpr int kDefaultRanks = 4;
constexpr base::EnvVariable kVariables[] = {
    {"TESSERA_LOG", "warn", "log level of the tool's ranks on standard error: debug, info, warn, error or off"},
    {"TESSERA_LAUNCH_SOCKET", "", "set by the tool if mpirun starts its ranks: the socket on which they report"}};

base::LogLevel log_level() try {
  return base::parse_log_level(base::env_or_default(kVariables[0]));
} catch (const base::InvalidUsage& error) {
  throw base::InvalidUsage(std::string(kVariables[0].name) + ": " + error.what());
}

std::shared_ptr<base::Logger> make_logger(int rank) {
  return std::make_shared<base::Logger>(log_level(), [rank](base::LogLevel level, std::string_view text) {
    // As notes and warnings, which the launcher forwards at once; the exception
    // reports a rank's failure.
    print_clean(stderr, "tessera: {}: rank {}: {}\n", level < base::LogLevel::warn ? "note" : "warning", rank, text);
  });
}

}  // namespace

int world_size(const std::optional<int>& ranks) {
  const comm::Launch launch = comm::resolve_launch();
  if (launch.launcher == "none") return ranks.value_or(kDefaultRanks);
  if (!ranks || *ranks == launch.size) return launch.size;
  if (launch.size == 1) return *ranks;
  throw base::InvalidUsage("--ranks " + std::to_string(*ranks) + " contradicts " + launch.launcher +
                           ", which started " + std::to_string(launch.size) + " ranks; leave --ranks out");
}

bool must_spawn(int ranks) { return ranks > 1 && comm::resolve_launch().size == 1; }

void warn_if_alone_under_launcher(int ranks) {
  const std::string launcher = comm::resolve_launch().launcher;
  if (launcher != "none" && must_spawn(ranks))
    print_clean(stderr, "tessera: note: {} started one rank; starting {} here\n", launcher, ranks);
}

std::string_view launch_socket_variable() { return kVariables[1].name; }

std::optional<std::string> launch_socket() { return base::read_env(kVariables[1]); }

std::vector<base::EnvVariable> all_variables() {
  std::vector<base::EnvVariable> all;
  for (const auto owned : {comm::variables(), nn::variables(), std::span<const base::EnvVariable>(kVariables)})
    all.insert(all.end(), owned.begin(), owned.end());
  std::ranges::sort(all, {}, &base::EnvVariable::name);
  return all;
}

std::optional<std::string> comm_variable(std::string_view name) {
  for (const base::EnvVariable& known : comm::variables())
    if (known.name == name) return base::read_env(known);
  return std::nullopt;
}

std::string comm_setting(std::string_view name) {
  for (const base::EnvVariable& known : comm::variables())
    if (known.name == name) return base::env_or_default(known);
  return "";
}

void check_variables() {
  check_backend(default_backend());
  static_cast<void>(comm::resolve_launch());
  static_cast<void>(nn::products_of_environment());
  static_cast<void>(nn::attention_library_of_environment());
  static_cast<void>(log_level());
}

std::string default_backend() { return comm_setting("TESSERA_BACKEND"); }

void check_backend(const std::string& name) {
  if (name == "auto") return;
  std::istringstream parts(name);
  for (std::string part; std::getline(parts, part, '+');) comm::find_backend(part);
}

void set_prefix(LaunchSpec& plan, const std::string& backend) {
  std::string name = backend.empty() ? default_backend() : backend;
  if (name == "auto") return;  // selects only backends that need no launcher of their own
  if (const std::size_t plus = name.find('+'); plus != std::string::npos) name.erase(0, plus + 1);
  for (const std::string_view given : comm::find_backend(name).launch_prefix) {
    std::string part(given);
    constexpr std::string_view kPrivate = "{private}";
    if (const std::size_t at = part.find(kPrivate); at != std::string::npos)
      part.replace(at, kPrivate.size(), comm::private_directory());
    const std::size_t equals = plan.prefix.empty() ? part.find('=') : std::string::npos;
    if (equals != std::string::npos)
      plan.environment.emplace_back(part.substr(0, equals), part.substr(equals + 1));
    else
      plan.prefix.push_back(std::move(part));
  }
}

LaunchSpec plan_for_this_program(int ranks, const std::vector<std::string>& arguments, const std::string& backend) {
  LaunchSpec plan;
  plan.ranks = ranks;
  set_prefix(plan, backend);
  const std::string self = "/proc/self/exe";  // which is another program once a prefix runs
  plan.command = {plan.prefix.empty() ? self : std::filesystem::read_symlink(self).string()};
  plan.command.insert(plan.command.end(), arguments.begin(), arguments.end());
  plan.own_program = true;
  return plan;
}

std::unique_ptr<comm::Communicator> init_world(const WorldInitOptions& options) {
  comm::InitOptions config;
  if (!options.backend.empty()) config.backend = options.backend;
  if (!options.algorithms.empty()) config.algorithms = options.algorithms;
  config.launch = options.ranks == 1 ? comm::Launch{} : comm::resolve_launch();
  config.launch->generation = static_cast<std::uint32_t>(options.generation);
  config.memory_tracker = options.memory_tracker;
  if (options.ordered && !comm_variable("TESSERA_DETERMINISTIC")) config.deterministic = true;
  if (options.device.type != base::DeviceType::cpu) config.device = base::open_device(options.device);
  if (!options.flight_recorder.empty()) config.flight_recorder = options.flight_recorder;
  config.logger = make_logger(config.launch->rank);
  return comm::init(std::move(config));
}

}  // namespace tessera::tools
