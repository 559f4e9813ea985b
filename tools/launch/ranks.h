// How a subcommand becomes ranks: a process that a launcher started is one already; any other starts copies of itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/communicator.h"
#include "tools/launch/launcher.h"

namespace tessera::tools {

/// The world's size: the launcher's if there is one (then --ranks must agree), else --ranks, else 4. --ranks may
/// override a launcher's world of one. Throws InvalidUsage.
int world_size(const std::optional<int>& ranks);

/// True if this process must start the ranks; false if it is one (or the only one).
bool must_spawn(int ranks);

/// Prints a note on standard error if a launcher has started only one rank, and this process starts the ranks.
void warn_if_alone_under_launcher(int ranks);

/// The value of comm's variable of that name. Throws nothing: an unknown name has no value.
std::optional<std::string> comm_variable(std::string_view name);

/// The value or default of comm's variable of that name.
std::string comm_setting(std::string_view name);

/// TESSERA_BACKEND's value or default.
std::string default_backend();
/// Reads the variables that determine how ranks start and compute. Throws InvalidUsage for the first wrong one.
void check_variables();
/// Throws InvalidUsage if this host can't use the backend, which may be "auto" or "near+far".
void check_backend(const std::string& name);

/// Sets the command that must start the ranks of a backend ("": the one of TESSERA_BACKEND), if it needs one, and the
/// environment that the command needs. Throws InvalidUsage if the backend can't be used.
void set_prefix(LaunchSpec& plan, const std::string& backend);

/// Returns the spec that runs this program with these arguments as ranks of a backend ("" as above).
LaunchSpec plan_for_this_program(int ranks, const std::vector<std::string>& arguments, const std::string& backend);

/// The variable that names the socket at which ranks started by another program report to the launcher, and its value
/// if it is set.
std::string_view launch_socket_variable();
std::optional<std::string> launch_socket();

/// The variables that the program itself declares, by name, without those of modules.
std::vector<base::EnvVariable> all_variables();

/// Options of init_world(), which joins all ranks of this job as one of them. It logs to standard error, from
/// TESSERA_LOG on.
struct WorldInitOptions {
  int ranks = 1;
  std::string backend;     ///< "" for TESSERA_BACKEND
  std::string algorithms;  ///< "" for TESSERA_ALGO
  int generation = 0;      ///< number of worlds that this process was part of before
  std::shared_ptr<base::MemoryTracker> memory_tracker;
  bool ordered = false;         ///< deterministic even if the backend's default is not, unless the user sets it
  base::Device device = {};     ///< the communicator must support its memory in addition to the host's
  std::string flight_recorder;  ///< directory; "" for TESSERA_FLIGHT_RECORDER
};
std::unique_ptr<comm::Communicator> init_world(const WorldInitOptions& options);

}  // namespace tessera::tools
