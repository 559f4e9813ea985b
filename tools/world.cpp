#include "tools/world.h"

#include <array>

#include "tessera/base/error.h"
#include "tessera/base/parse.h"

namespace tessera::tools {
namespace {
constexpr base::EnvVariable kRank{"TESSERA_RANK", "", "rank of this process; the launcher sets it"};
constexpr base::EnvVariable kWorldSize{"TESSERA_WORLD_SIZE", "", "number of ranks; the launcher sets it"};
constexpr base::EnvVariable kLocalRank{"TESSERA_LOCAL_RANK", "", "rank among those on this host; the launcher sets it"};
constexpr base::EnvVariable kLocalWorldSize{"TESSERA_LOCAL_WORLD_SIZE", "", "ranks on this host; the launcher sets it"};
constexpr base::EnvVariable kRunId{"TESSERA_RUN_ID", "", "what the ranks of one run have in common; the launcher sets it"};
constexpr base::EnvVariable kToken{"TESSERA_TOKEN", "", "secret by which ranks know each other; the launcher sets it"};
constexpr std::array kVariables = {kRank, kWorldSize, kLocalRank, kLocalWorldSize, kRunId, kToken};
}  // namespace

World this_world() {
  const auto rank = base::read_env(kRank);
  const auto size = base::read_env(kWorldSize);
  if (!rank && !size) return {};
  if (!rank || !size)
    throw base::InvalidUsage("TESSERA_RANK and TESSERA_WORLD_SIZE belong together, but only " +
                             std::string(rank ? kRank.name : kWorldSize.name) + " is set; set both or neither");
  World world{.is_rank = true, .started_by_us = base::read_env(kRunId).has_value()};
  world.size = static_cast<int>(base::parse_integer(*size, kWorldSize.name, 1, 1 << 20));
  world.rank = static_cast<int>(base::parse_integer(*rank, kRank.name, 0, world.size - 1));
  return world;
}

std::span<const base::EnvVariable> world_variables() { return kVariables; }

}  // namespace tessera::tools
