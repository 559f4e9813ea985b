// The backends that exist, by name.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

class Bootstrap;

struct WorldOptions {
  CommunicatorOptions communicator;
  bool deterministic = true;
  std::string algorithms;       ///< TESSERA_ALGO's grammar; "" for the backend's own choice
  bool check = false;           ///< TESSERA_CHECK: compare what the ranks call before an operation counts as done
  bool progress_thread = true;  ///< off only in tests: nothing then moves while its rank is outside the library
};

/// One entry of the registry. A backend's folder defines one, and `add_backend(name)` lists it.
struct Backend {
  std::string_view name;
  std::string_view devices;  ///< "cpu", "cuda", ...: for people
  /// Why it can't be used here; "" where it can. Must not throw, or start anything that stays.
  std::string (*probe)();
  /// The communicator of all ranks that `bootstrap` connects. Every rank calls it.
  std::unique_ptr<Communicator> (*create)(std::shared_ptr<Bootstrap> bootstrap, const WorldOptions& options);
  /// The backend's own environment variables.
  std::span<const EnvVariable> variables;
};

struct BackendState {
  std::string name;
  bool available = false;
  std::string reason;  ///< why not, or ""
  std::string devices;
};

/// All of them with their state, by name.
TESSERA_API std::vector<BackendState> list_backends();

/// Throws InvalidUsage, listing every backend with its state, where the name is unknown or the backend can't be used.
TESSERA_API const Backend& find_backend(std::string_view name);

}  // namespace tessera::comm
