#include "tessera/comm/init.h"

#include <algorithm>
#include <exception>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/parse.h"
#include "tessera/base/thread.h"
#include "tessera/comm/bootstrap/rendezvous.h"
#include "tessera/comm/bootstrap/secure_stream.h"
#include "tessera/comm/bootstrap/thread_bootstrap.h"
#include "tessera/comm/core/argument_checker.h"
#include "tessera/comm/core/env_variables.h"
#include "tessera/comm/core/worlds.h"
#include "tessera/comm/flight_recorder.h"
#include "tessera/comm/plugins/module_loader.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/staging.h"

namespace tessera::comm {
namespace {

/// A path that isn't there is refused even where no module is needed, as other variables' values are.
void check_plugin_path() {
  if (!read_env(env::kPluginPath)) return;
  for (const ModuleFile& file : find_modules())
    if (!file.problem.empty()) throw InvalidUsage("init: " + file.path + ": " + file.problem);
}

BackendOptions world_options(const InitOptions& config) {
  check_plugin_path();
  BackendOptions options;
  base::open_closed_streams();
  options.communicator.timeout = checked_timeout(
      "init", config.timeout ? *config.timeout : parse_duration(env_or_default(env::kTimeout), env::kTimeout.name));
  options.communicator.logger = config.logger;
  options.communicator.memory_tracker = config.memory_tracker;
  options.check = config.check ? *config.check : parse_flag(env_or_default(env::kCheck), env::kCheck.name);
  options.algorithms = config.algorithms ? *config.algorithms : env_or_default(env::kAlgo);
  options.progress_thread = config.progress_thread;
  options.tls = tls_from_environment();
  options.global_ranks = config.global_ranks;
  if (config.device != nullptr) options.device = config.device->device();
  return options;
}

/// Empty: the backend's default.
std::optional<bool> deterministic(const InitOptions& config) {
  if (config.deterministic) return config.deterministic;
  const auto set = read_env(env::kDeterministic);
  return set ? std::optional(parse_flag(*set, env::kDeterministic.name)) : std::nullopt;
}

std::string backend_name(const InitOptions& config) {
  return config.backend ? *config.backend : env_or_default(env::kBackend);
}

bool supports_device_memory(const Communicator& world) {
  const std::vector<MemoryKind>& kinds = world.capabilities().memory;
  return std::ranges::find(kinds, MemoryKind::device) != kinds.end();
}

std::unique_ptr<Communicator> decorated(std::unique_ptr<Communicator> world, const InitOptions& config,
                                        const BackendOptions& options) {
  const bool ipc =
      config.device_ipc ? *config.device_ipc : parse_flag(env_or_default(env::kDeviceIpc), env::kDeviceIpc.name);
  if (config.device != nullptr && !config.device->host_accessible() && !supports_device_memory(*world)) {
    StagingOptions staging{.algorithms = options.algorithms};
    staging.ipc = ipc;
    world = stage(std::move(world), config.device, std::move(staging));
  }
  const std::string records = config.flight_recorder ? *config.flight_recorder : env_or_default(env::kFlightRecorder);
  if (!records.empty()) world = record_flight(std::move(world), records, config.device);
  return config.decorate ? config.decorate(std::move(world)) : std::move(world);
}

/// Memory of the start grows with the size, and beyond the largest machines it is a mistake.
constexpr int kMostRanks = 1 << 16;

void check_launch(const Launch& launch) {
  const auto check = [&](std::string_view what, int value, int low, int high) {
    if (value < low || value > high)
      throw InvalidUsage("launch (" + launch.launcher + "): " + std::string(what) + " is " + std::to_string(value) +
                         ", needs " + std::to_string(low) + " to " + std::to_string(high));
  };
  check("size", launch.size, 1, kMostRanks);
  check("rank", launch.rank, 0, launch.size - 1);
}

std::shared_ptr<Bootstrap> gather_ranks(const Launch& launch, const InitOptions& config,
                                        const BackendOptions& options) {
  if (config.store != nullptr && (config.master || config.token))
    throw InvalidUsage("init: options have a store as well as a master or a token; the ranks need only one of these");
  check_launch(launch);
  if (launch.size == 1) return make_thread_bootstraps(1, options.communicator.timeout).front();
  return rendezvous({.launch = launch,
                     .timeout = options.communicator.timeout,
                     .master = config.master ? *config.master : env_or_default(env::kMaster),
                     .token = config.token ? *config.token : env_or_default(env::kToken),
                     .host_id = env_or_default(env::kHostId),
                     .tls = options.tls,
                     .store = config.store,
                     .logger = config.logger});
}

std::unique_ptr<Communicator> make_world(std::shared_ptr<Bootstrap> bootstrap, const InitOptions& config,
                                         BackendOptions options) {
  auto world = make_world(backend_name(config), std::move(bootstrap), options, deterministic(config));
  return decorated(std::move(world), config, options);
}

/// The communicators of ranks that are threads, so that the first failure can stop the others.
class ThreadRanks {
 public:
  explicit ThreadRanks(int ranks) : members_(static_cast<std::size_t>(ranks)) {}

  void enter(int rank, Communicator* member) {
    const std::lock_guard lock(mutex_);
    members_[static_cast<std::size_t>(rank)] = member;
  }
  /// Records the first error and stops all other ranks.
  void fail(ThreadBootstrap& bootstrap, int rank, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_ != nullptr) return;
    error_ = std::move(error);
    bootstrap.abandon();
    for (Communicator* member : members_)
      if (member != nullptr) member->abort("rank " + std::to_string(rank) + " left with an exception");
  }
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  std::mutex mutex_;
  std::vector<Communicator*> members_;
  std::exception_ptr error_;
};

void run_rank(ThreadBootstrap& bootstrap, const std::function<std::unique_ptr<Communicator>()>& create,
              ThreadRanks& thread_ranks, const std::function<void(Communicator&)>& body) {
  const int rank = bootstrap.rank();
  try {
    const std::unique_ptr<Communicator> world = create();
    thread_ranks.enter(rank, world.get());
    try {
      body(*world);
    } catch (const std::exception& error) {
      record_failure(*world, error.what());
      thread_ranks.fail(bootstrap, rank, std::current_exception());
    } catch (...) {
      thread_ranks.fail(bootstrap, rank, std::current_exception());
    }
    thread_ranks.enter(rank, nullptr);  // before the communicator is destroyed
  } catch (...) {
    thread_ranks.fail(bootstrap, rank, std::current_exception());
  }
}

}  // namespace

std::unique_ptr<Communicator> init(InitOptions config) {
  const Launch launch = config.launch ? *config.launch : resolve_launch();
  const BackendOptions options = world_options(config);
  return make_world(gather_ranks(launch, config, options), config, options);
}

std::unique_ptr<Communicator> make_world(std::shared_ptr<Bootstrap> bootstrap, InitOptions config) {
  return make_world(std::move(bootstrap), config, world_options(config));
}

void run_threads(int ranks, const InitOptions& config, const std::function<void(Communicator&)>& body) {
  check_launch({.launcher = "threads", .size = ranks});
  const BackendOptions options = world_options(config);
  const auto bootstraps = make_thread_bootstraps(ranks, options.communicator.timeout);
  ThreadRanks thread_ranks(ranks);
  std::vector<std::thread> threads;
  try {
    for (const auto& bootstrap : bootstraps)
      threads.push_back(base::start_program_thread([&, bootstrap] {
        run_rank(
            *bootstrap, [&] { return make_world(bootstrap, config, options); }, thread_ranks, body);
      }));
  } catch (const SystemError&) {
    thread_ranks.fail(*bootstraps.front(), static_cast<int>(threads.size()), std::current_exception());
  }
  for (std::thread& thread : threads) thread.join();
  thread_ranks.rethrow();
}

std::span<const EnvVariable> variables() {
  static const std::vector<EnvVariable> kAll = [] {
    std::vector<EnvVariable> all = {env::kAlgo,          env::kBackend,   env::kCheck,          env::kCma,
                                    env::kDeterministic, env::kDeviceIpc, env::kFlightRecorder, env::kHostId,
                                    env::kLauncher,      env::kLocalRank, env::kLocalWorldSize, env::kMaster,
                                    env::kPluginPath,    env::kRank,      env::kRunId,          env::kTimeout,
                                    env::kTls,           env::kTlsCa,     env::kTlsCert,        env::kTlsKey,
                                    env::kToken,         env::kWorldSize};
    for (const Backend* backend : builtin_backends())
      all.insert(all.end(), backend->variables.begin(), backend->variables.end());
    std::ranges::sort(all, [](const EnvVariable& a, const EnvVariable& b) { return a.name < b.name; });
    return all;
  }();
  return kAll;
}

}  // namespace tessera::comm
