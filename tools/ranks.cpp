#include "tools/ranks.h"

#include "tessera/base/error.h"
#include "tessera/comm/context.h"
#include "tessera/comm/launch.h"
#include "tools/process.h"

namespace tessera::tools {
namespace {
constexpr int kDefaultRanks = 4;
}

int world_size(const std::optional<int>& ranks) {
  const comm::Launch launch = comm::resolve_launch();
  if (launch.launcher == "none") return ranks.value_or(kDefaultRanks);
  if (!ranks || *ranks == launch.size) return launch.size;
  if (launch.size == 1) return *ranks;
  throw base::InvalidUsage("--ranks " + std::to_string(*ranks) + " contradicts " + launch.launcher +
                           ", which started " + std::to_string(launch.size) + " ranks; leave --ranks out");
}

bool must_spawn(int ranks) { return ranks > 1 && comm::resolve_launch().size == 1; }

LaunchPlan plan_for_training(const TrainPlan& plan, std::vector<std::string> arguments) {
  // Said by the one that sees all cores: a bound rank sees its share only.
  if (!plan.options.threads) arguments.insert(arguments.end(), {"--threads", std::to_string(plan.threads)});
  LaunchPlan launch_plan = plan_for_this_program(plan.ranks, arguments);
  launch_plan.bind_to_cores = plan.ranks * plan.threads <= static_cast<int>(allowed_cores().size());
  return launch_plan;
}

std::unique_ptr<comm::Communicator> join_world(const JoinOptions& options) {
  comm::Config config;
  if (!options.backend.empty()) config.backend = options.backend;
  if (!options.algorithms.empty()) config.algorithms = options.algorithms;
  config.launch = options.ranks == 1 ? comm::Launch{} : comm::resolve_launch();
  config.launch->generation = static_cast<std::uint32_t>(options.generation);
  config.ledger = options.ledger;
  return comm::init(std::move(config));
}

}  // namespace tessera::tools
