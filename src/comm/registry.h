// The backends that exist, by name.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/failure.h"

namespace tessera::comm {

class Bootstrap;

struct BackendOptions {
  CommunicatorOptions communicator;
  bool deterministic = true;
  std::string algorithms;       ///< TESSERA_ALGO's grammar; "" for the backend's own choice
  bool check = false;           ///< TESSERA_CHECK: compare what the ranks call before an operation counts as done
  bool progress_thread = true;  ///< off only in tests: nothing then moves while its rank is outside the library
  std::shared_ptr<FirstFailureRecord>
      first_failure;           ///< of this rank, in this world and others beside it; null: nobody asks
  std::vector<int> job_ranks;  ///< by rank, where these are some of the job's only: their ranks there; else empty

  void note_failure(std::string_view cause) const noexcept {
    if (first_failure != nullptr) first_failure->note(cause);
  }
  std::string first_failure_cause() const { return first_failure == nullptr ? "" : first_failure->cause(); }

  /// How errors name a rank of this world to people, who know the job's.
  int job_rank(int rank) const { return job_ranks.empty() ? rank : job_ranks[static_cast<std::size_t>(rank)]; }
};

/// One entry of the registry. A backend's folder defines one, and `add_backend(name)` lists it: as a part of the
/// library or as a loadable module (plugin.h).
struct Backend {
  std::string_view name;
  std::string_view devices;  ///< "cpu", "cuda", ...: for people
  /// Why it can't be used here; "" where it can. Must not throw, or start anything that stays.
  std::function<std::string()> probe;
  /// The communicator of all ranks that `bootstrap` connects. Every rank calls it.
  std::function<std::unique_ptr<Communicator>(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options)>
      create;
  /// The backend's own environment variables.
  std::span<const EnvVariable> variables;
  bool one_host = false;  ///< its ranks must share a host
  /// What a program gets that says nothing: BackendOptions::deterministic.
  bool deterministic = true;
  /// The command under which its ranks must be started, with "{ranks}" for their number; empty: any launcher will do.
  std::span<const std::string_view> launch_prefix = {};
};

/// A module's EnvVariable, with text of its own: the module needn't be loaded in this process.
struct ModuleVariable {
  std::string name;
  std::string default_value;
  std::string help;
};

struct BackendState {
  std::string name;
  bool available = false;
  std::string reason;  ///< why not, or ""
  std::string devices;
  std::vector<std::string> launch_prefix;  ///< as Backend::launch_prefix
  std::vector<ModuleVariable> variables;   ///< of modules; those of built-in backends are in comm::variables()
};

/// All of them with their state, by name. Modules are asked in processes of their own, since loading one may load a
/// vendor's library: that takes tens of milliseconds. What is named like a module but isn't one is listed with the
/// reason.
TESSERA_API std::vector<BackendState> list_backends();

/// Loads the backend's module where it is one; the reference stays valid. Throws InvalidUsage, listing every backend
/// with its state, where the name is unknown or the backend can't be used.
TESSERA_API const Backend& find_backend(std::string_view name);

}  // namespace tessera::comm
