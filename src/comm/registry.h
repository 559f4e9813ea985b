// The registry of backends by name.
#pragma once

#include <functional>
#include <memory>
#include <optional>
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
class TlsContext;

/// What init() passes to Backend::create.
struct BackendOptions {
  CommunicatorOptions communicator;  ///< options of the world communicator
  bool deterministic = true;         ///< deterministic mode (TESSERA_DETERMINISTIC)
  std::string algorithms;            ///< algorithms in the grammar of TESSERA_ALGO; "": the backend chooses
  bool check = false;  ///< checked mode (TESSERA_CHECK): compare the ranks' calls before an operation completes
  bool progress_thread = true;  ///< off only in tests: operations then progress only inside calls of their rank
  /// The record of this rank's first failure, in this world and others; null: not recorded.
  std::shared_ptr<FirstFailureRecord> first_failure;
  std::shared_ptr<const TlsContext> tls;  ///< encrypts the connections between the ranks; null: they are plain
  std::optional<Device> device;           ///< device of this rank; none: a backend of devices chooses one
  std::vector<int> global_ranks;  ///< global rank of each rank if this world has only some of the job's; else empty

  /// Records a cause in `first_failure`, if there is one. Thread-safe.
  void record_failure(std::string_view cause) const noexcept {
    if (first_failure != nullptr) first_failure->record(cause);
  }
  /// "" without a failure, or if none is recorded.
  std::string first_failure_cause() const { return first_failure == nullptr ? "" : first_failure->cause(); }

  /// The rank number in error messages, which use the job's ranks.
  int global_rank(int rank) const { return global_ranks.empty() ? rank : global_ranks[static_cast<std::size_t>(rank)]; }
};

/// One entry of the registry. A backend's folder defines it, and `add_backend(name)` registers it, built into the
/// library or as a loadable module (plugin.h).
struct Backend {
  std::string_view name;     ///< name as in TESSERA_BACKEND
  std::string_view devices;  ///< "cpu", "cuda", ...: for display
  /// Why the backend can't be used on this machine; "" if it can. Must not throw or start anything permanent.
  std::function<std::string()> probe;
  /// Creates the communicator of all ranks that `bootstrap` connects. Every rank calls it.
  std::function<std::unique_ptr<Communicator>(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options)>
      create;
  /// The backend's own environment variables.
  std::span<const EnvVariable> variables;
  bool one_host = false;  ///< whether its ranks must share a host
  bool encrypts = false;  ///< whether it encrypts its data with BackendOptions::tls (TESSERA_TLS=1)
  /// The default of BackendOptions::deterministic.
  bool deterministic = true;
  /// The command that must start its ranks, with "{ranks}" for their number and "{private}" for a directory of /tmp
  /// that only this user can enter; before it, variables of its environment, such as "NAME=value". Empty: any launcher.
  std::span<const std::string_view> launch_prefix = {};
};

/// A module's EnvVariable with owned text, since the module may not be loaded in this process.
struct ModuleVariable {
  std::string name;           ///< EnvVariable::name
  std::string default_value;  ///< EnvVariable::default_value
  std::string help;           ///< EnvVariable::help
};

/// A backend as list_backends() reports it.
struct BackendState {
  std::string name;                        ///< name as in TESSERA_BACKEND; of a module from its file name
  bool available = false;                  ///< true if find_backend() would return it
  std::string reason;                      ///< why it can't be used, or ""
  std::string devices;                     ///< Backend::devices
  std::vector<std::string> launch_prefix;  ///< see Backend::launch_prefix
  std::vector<ModuleVariable> variables;   ///< variables of modules; comm::variables() has those of built-in backends
};

/// All backends with their state, by name. Each module is probed in a process of its own, which takes tens of
/// milliseconds, since loading one may load a vendor's library. Files that are named like a module but aren't one are
/// listed with the reason.
TESSERA_API std::vector<BackendState> list_backends();

/// Finds a backend, loading its module if it is one; the reference stays valid. Throws InvalidUsage, listing every
/// backend with its state, if the name is unknown or the backend can't be used.
TESSERA_API const Backend& find_backend(std::string_view name);

}  // namespace tessera::comm
