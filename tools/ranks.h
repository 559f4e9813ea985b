// How a subcommand becomes ranks: started by a launcher it is one already; else it starts copies of itself.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/ledger.h"
#include "tessera/comm/communicator.h"
#include "tools/launcher.h"
#include "tools/train_options.h"

namespace tessera::tools {

/// The world's size: the launcher's where there is one (then --ranks must agree), else --ranks, else 4. A launcher's
/// world of one may be overruled by --ranks. Throws InvalidUsage.
int world_size(const std::optional<int>& ranks);

/// True where this process must start the ranks; false where it is one (or the only one).
bool must_spawn(int ranks);

/// The plan that runs this very program with these arguments as the ranks of a training. They are bound to their shares
/// of the cores where each computing thread finds one; where there are more threads than cores, the scheduler balances
/// better than a fixed share would.
LaunchPlan plan_for_training(const TrainPlan& plan, std::vector<std::string> arguments);

/// The communicator of all ranks of this job, as one of them.
struct JoinOptions {
  int ranks = 1;
  std::string backend;     ///< "" for TESSERA_BACKEND
  std::string algorithms;  ///< "" for TESSERA_ALGO
  int generation = 0;      ///< counts the worlds that this process is part of one after another
  std::shared_ptr<base::Ledger> ledger;
};
std::unique_ptr<comm::Communicator> join_world(const JoinOptions& options);

}  // namespace tessera::tools
