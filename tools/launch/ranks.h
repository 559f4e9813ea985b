// How a subcommand becomes ranks: started by a launcher it is one already; else it starts copies of itself.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/communicator.h"
#include "tools/launch/launcher.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// The world's size: the launcher's where there is one (then --ranks must agree), else --ranks, else 4. A launcher's
/// world of one may be overruled by --ranks. Throws InvalidUsage.
int world_size(const std::optional<int>& ranks);

/// True where this process must start the ranks; false where it is one (or the only one).
bool must_spawn(int ranks);

/// Says so on standard error where a launcher has started one rank only, and these are started here instead.
void note_if_alone_under_a_launcher(int ranks);

/// The plan that runs this very program with these arguments as the ranks of a training. They are bound to their shares
/// of the cores where each computing thread finds one; where there are more threads than cores, the scheduler balances
/// better than a fixed share would.
LaunchSpec training_launch_spec(const TrainPlan& plan, std::vector<std::string> arguments);

/// What is set for comm's variable of that name. Throws nothing: an unknown name has no value.
std::optional<std::string> comm_variable(std::string_view name);

/// TESSERA_BACKEND's value or default.
std::string default_backend();

/// What must start the ranks of a backend ("": the one of TESSERA_BACKEND), as LaunchSpec::prefix; empty for most.
/// Throws InvalidUsage where the backend can't be used.
std::vector<std::string> launch_prefix(const std::string& backend);

/// The plan that runs this very program with these arguments as ranks of a backend ("" likewise).
LaunchSpec plan_for_this_program(int ranks, const std::vector<std::string>& arguments, const std::string& backend);

/// Where ranks that another program has started report to the launcher: the variable's name, and its value if it is
/// set.
std::string_view launch_socket_variable();
std::optional<std::string> launch_socket();

/// What the tool itself reads.
std::span<const base::EnvVariable> tool_variables();

/// The communicator of all ranks of this job, as one of them. It logs to standard error, from TESSERA_LOG on.
struct WorldInitOptions {
  int ranks = 1;
  std::string backend;     ///< "" for TESSERA_BACKEND
  std::string algorithms;  ///< "" for TESSERA_ALGO
  int generation = 0;      ///< counts the worlds that this process is part of one after another
  std::shared_ptr<base::MemoryTracker> memory_tracker;
  bool ordered = false;      ///< deterministic also where the backend's default is otherwise, unless the user says
  base::Device device = {};  ///< whose memory the communicator must take beside the host's
};
std::unique_ptr<comm::Communicator> init_world(const WorldInitOptions& options);

}  // namespace tessera::tools
