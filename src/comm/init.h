// How a program gets its first communicator.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "tessera/base/device_runtime.h"
#include "tessera/base/env.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/launch.h"

namespace tessera::comm {

/// Puts something around the communicator of the world: a plug-in that watches or disturbs it, say. Each rank calls it
/// once.
using CommunicatorDecorator = std::function<std::unique_ptr<Communicator>(std::unique_ptr<Communicator>)>;

/// What is not set here comes from the environment (see variables()), else from its default.
struct InitOptions {
  std::optional<std::string> backend;                ///< TESSERA_BACKEND
  std::optional<Launch> launch;                      ///< who this process is, instead of resolve_launch()
  std::optional<std::chrono::milliseconds> timeout;  ///< TESSERA_TIMEOUT
  std::optional<bool> deterministic;                 ///< TESSERA_DETERMINISTIC
  std::optional<bool> check;                         ///< TESSERA_CHECK
  std::optional<std::string> algorithms;             ///< TESSERA_ALGO
  std::shared_ptr<Logger> logger;
  std::shared_ptr<MemoryTracker> memory_tracker;
  bool progress_thread = true;
  /// Communicators then take its memory too, by way of the host's where the backend doesn't (staging.h). Null: the
  /// host's memory, and what the backend itself takes. Ranks that are threads share it.
  std::shared_ptr<DeviceRuntime> device;
  std::optional<bool> device_ipc;  ///< TESSERA_DEVICE_IPC
  CommunicatorDecorator decorate;  ///< null: nothing
};

/// The communicator of the whole world. Every rank of the job calls it; it waits for all, at longest the timeout. Ranks
/// that make several, one after another, give each a `launch->generation` of its own, counting up.
/// Throws InvalidUsage (settings), Timeout (ranks that never came), SystemError.
TESSERA_API std::unique_ptr<Communicator> init(InitOptions config = {});

/// Runs `body` on `ranks` threads of this process as the ranks of a world of their own. Waits for all. The first
/// exception aborts the other ranks and is thrown again. `config.launch` is not used; each rank has a ledger of its own
/// unless one is given.
TESSERA_API void run_threads(int ranks, const InitOptions& config, const std::function<void(Communicator&)>& body);

/// All environment variables that comm and its backends read, by name.
TESSERA_API std::span<const EnvVariable> variables();

}  // namespace tessera::comm
