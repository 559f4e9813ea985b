// Creates a program's first communicator.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/env.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/rendezvous_store.h"

namespace tessera::comm {

class Bootstrap;

/// Wraps the world communicator, for example with a plug-in that traces or delays it. Each rank calls it once.
using CommunicatorDecorator = std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>;

/// Unset options come from the environment (see variables()), else from their defaults.
struct InitOptions {
  std::optional<std::string> backend;  ///< TESSERA_BACKEND
  std::optional<Launch> launch;        ///< replaces resolve_launch()
  /// If these ranks are only some of a job's: the number of each in the job, for error messages. Empty: their own.
  std::vector<int> global_ranks;
  std::optional<std::string> master;  ///< TESSERA_MASTER
  std::optional<std::string> token;   ///< TESSERA_TOKEN: random, 128 bits, such as `openssl rand -hex 16` makes
  /// How the ranks find each other, instead of by master and token, which must then be unset here; those in the
  /// environment don't matter then. Null: by the environment.
  std::shared_ptr<RendezvousStore> store;
  std::optional<std::chrono::milliseconds> timeout;  ///< TESSERA_TIMEOUT; the largest value: no limit (a century)
  std::optional<bool> deterministic;                 ///< TESSERA_DETERMINISTIC
  std::optional<bool> check;                         ///< TESSERA_CHECK
  std::optional<std::string> algorithms;             ///< TESSERA_ALGO
  std::shared_ptr<Logger> logger;                    ///< null: no logging
  std::shared_ptr<MemoryTracker> memory_tracker;     ///< null: creates one
  bool progress_thread = true;  ///< off only in tests: operations then progress only inside calls of their rank
  /// Communicators also support the memory of this device, staged through host memory if the backend doesn't support it
  /// (staging.h); a backend that does uses this device. Null: only host memory and what the backend supports. Ranks
  /// that are threads share the device.
  std::shared_ptr<DeviceRuntime> device;
  std::optional<bool> device_ipc;              ///< TESSERA_DEVICE_IPC
  std::optional<std::string> flight_recorder;  ///< TESSERA_FLIGHT_RECORDER: see record_flight(); "": none
  CommunicatorDecorator decorate;              ///< null: no decorator
};

/// Creates the world communicator. Every rank of the job calls it; it waits for all ranks, at most for the timeout.
/// Ranks that create several in succession give each a new, increasing `launch->generation`. Settings that the ranks
/// must have alike (the version, TESSERA_BACKEND, TESSERA_DETERMINISTIC, TESSERA_CHECK, the text of TESSERA_ALGO and
/// what a backend adds) are compared: if one differs, all ranks throw one error that names it, its values and their
/// ranks.
///
/// Opens /dev/null in place of standard streams that are closed, so that no descriptor of a library becomes one. The
/// library's threads take no signals. Throws InvalidUsage (settings), Timeout (missing ranks), SystemError.
TESSERA_API std::unique_ptr<Communicator> init(InitOptions config = {});

/// The same as init(), for ranks that `bootstrap` connects: launch, master, token and store are not used.
TESSERA_API std::unique_ptr<Communicator> make_world(std::shared_ptr<Bootstrap> bootstrap, InitOptions config = {});

/// Runs `body` on `ranks` threads of this process, which are the ranks of a new world. Waits for all. The first
/// exception aborts the other ranks and is rethrown. `config.launch` is ignored; each rank has its own memory tracker
/// unless one is given. Throws SystemError if the system has too few threads.
TESSERA_API void run_threads(int ranks, const InitOptions& config, const std::function<void(Communicator&)>& body);

/// All environment variables that comm and its backends read, by name.
TESSERA_API std::span<const EnvVariable> variables();

}  // namespace tessera::comm
