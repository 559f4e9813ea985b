#include "tessera/comm/launch.h"

#include <unistd.h>

#include <array>
#include <span>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/internal/variables.h"

namespace tessera::comm {
namespace {

/// What one launcher sets. Of each list the first that is set counts, of `job` all.
struct Launcher {
  std::string_view name;
  std::vector<std::string> marks;  ///< all of these, if any: only then is it this launcher
  std::vector<std::string> rank;
  std::vector<std::string> size;
  std::vector<std::string> local_rank;
  std::vector<std::string> local_size;
  std::vector<std::string> job;
};

const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> kLaunchers = {
      {"tessera",
       {},
       {std::string(env::kRank.name)},
       {std::string(env::kWorldSize.name)},
       {std::string(env::kLocalRank.name)},
       {std::string(env::kLocalWorldSize.name)},
       {std::string(env::kRunId.name)}},
      {"torchrun",
       {},
       {"RANK"},
       {"WORLD_SIZE"},
       {"LOCAL_RANK"},
       {"LOCAL_WORLD_SIZE"},
       {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}},
      {"openmpi",
       {},
       {"OMPI_COMM_WORLD_RANK"},
       {"OMPI_COMM_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
      {"pmi",
       {},
       {"PMI_RANK", "PALS_RANKID"},
       {"PMI_SIZE"},
       {"MPI_LOCALRANKID", "PALS_LOCAL_RANKID"},
       {"MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"},
       {"PALS_APID", "PMI_JOBID", "HYDRA_PARENT"}},
      {"slurm",
       {"SLURM_STEP_ID"},
       {"SLURM_PROCID"},
       {"SLURM_STEP_NUM_TASKS"},
       {"SLURM_LOCALID"},
       {"SLURM_STEP_TASKS_ON_NODE"},
       {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
  };
  return kLaunchers;
}

constexpr std::string_view kParent = "parent-";

std::optional<std::pair<std::string, std::string>> first_set(const EnvReader& read,
                                                             const std::vector<std::string>& names) {
  for (const std::string& name : names)
    if (auto value = read(name)) return std::pair(name, *value);
  return std::nullopt;
}

bool present(const EnvReader& read, const Launcher& launcher) {
  for (const std::string& mark : launcher.marks)
    if (!read(mark)) return false;
  return first_set(read, launcher.rank) || first_set(read, launcher.size);
}

/// All that the launcher's variables say, for errors: "RANK=2, WORLD_SIZE is not set".
std::string findings(const EnvReader& read, const Launcher& launcher) {
  std::string text;
  for (const auto* names : {&launcher.rank, &launcher.size, &launcher.local_rank, &launcher.local_size})
    for (const std::string& name : *names) {
      const auto value = read(name);
      text += (text.empty() ? "" : ", ") + name + (value ? "=" + *value : " is not set");
    }
  return text;
}

int whole(const std::pair<std::string, std::string>& setting, int low) {
  return static_cast<int>(parse_integer(setting.second, setting.first, low, 1 << 20));
}

Launch take(const EnvReader& read, const Launcher& launcher) {
  const auto rank = first_set(read, launcher.rank);
  const auto size = first_set(read, launcher.size);
  const std::string found = std::string(launcher.name) + " launcher: " + findings(read, launcher);
  if (!rank || !size) throw InvalidUsage(found + "; rank and number of ranks must both be set");
  Launch launch;
  launch.launcher = launcher.name;
  launch.rank = whole(*rank, 0);
  launch.size = whole(*size, 1);
  if (launch.rank >= launch.size) throw InvalidUsage(found + "; the rank must be below the number of ranks");
  const auto local_rank = first_set(read, launcher.local_rank);
  const auto local_size = first_set(read, launcher.local_size);
  launch.local_rank = local_rank ? whole(*local_rank, 0) : launch.rank;
  launch.local_size = local_size ? whole(*local_size, 1) : launch.size;
  if (launch.local_rank >= launch.local_size)
    throw InvalidUsage(found + "; the local rank must be below the number of local ranks");
  for (const std::string& name : launcher.job)
    if (const auto value = read(name)) launch.job += (launch.job.empty() ? "" : ".") + *value;
  return launch;
}

}  // namespace

Launch resolve_launch(const EnvReader& read) {
  const auto forced = read(std::string(env::kLauncher.name));
  if (forced == "none") return {};
  for (const Launcher& launcher : launchers()) {
    if (forced ? *forced != launcher.name : !present(read, launcher)) continue;
    return take(read, launcher);
  }
  if (!forced) return {};
  std::string known = "none";
  for (const Launcher& launcher : launchers()) known += " " + std::string(launcher.name);
  throw InvalidUsage(std::string(env::kLauncher.name) + ": unknown launcher '" + *forced + "'; known: " + known);
}

Launch resolve_launch() {
  Launch launch = resolve_launch([](const std::string& name) { return read_foreign_env(name); });
  // Ranks of one launcher on one host have one parent, where the launcher gives no better name.
  if (launch.size > 1 && launch.job.empty()) {
    launch.job = std::string(kParent) + std::to_string(::getppid());
    launch.job_is_local = true;
  }
  return launch;
}

}  // namespace tessera::comm
