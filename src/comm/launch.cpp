#include "tessera/comm/launch.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/parse.h"
#include "tessera/comm/core/env_variables.h"

namespace tessera::comm {
namespace {

/// The variables of one launcher. The first one set of each list is used; of `job`, all.
struct Launcher {
  std::string_view name;
  std::vector<std::string> marks;  ///< it is this launcher only if all of these are set; a batch script has the rest
  std::vector<std::string> rank;
  std::vector<std::string> size;
  std::vector<std::string> local_rank;
  std::vector<std::string> local_size;
  std::vector<std::string> job;
  std::string restart;    ///< how often the run was restarted
  std::string per_node;   ///< ranks on each node, as "2(x3),1", if there is no local_size ...
  std::string node = {};  ///< ... and the index of this node
};

const std::vector<Launcher>& launchers() {
  static const std::vector<Launcher> kLaunchers = {
      {"tessera",
       {},
       {std::string(env::kRank.name)},
       {std::string(env::kWorldSize.name)},
       {std::string(env::kLocalRank.name)},
       {std::string(env::kLocalWorldSize.name)},
       {}},  // TESSERA_RUN_ID names the job under all launchers
      {"torchrun",
       {},
       {"RANK"},
       {"WORLD_SIZE"},
       {"LOCAL_RANK"},
       {"LOCAL_WORLD_SIZE"},
       // Not MASTER_ADDR: under Kubernetes each pod may spell it differently.
       {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"},
       "TORCHELASTIC_RESTART_COUNT"},
      {"openmpi",
       {},
       {"OMPI_COMM_WORLD_RANK"},
       {"OMPI_COMM_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
      {"mvapich",
       {},
       {"MV2_COMM_WORLD_RANK"},
       {"MV2_COMM_WORLD_SIZE"},
       {"MV2_COMM_WORLD_LOCAL_RANK"},
       {"MV2_COMM_WORLD_LOCAL_SIZE"},
       {"MPIRUN_ID"}},
      {"pmi",
       {},
       {"PMI_RANK", "PALS_RANKID"},
       {"PMI_SIZE"},
       {"MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"},
       {"MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"},
       {"PALS_APID", "PMI_JOBID"}},  // MPICH's Hydra sets neither: then the parent process is used
      {"slurm",
       {"SLURM_STEP_ID"},
       {"SLURM_PROCID"},
       {"SLURM_STEP_NUM_TASKS"},
       {"SLURM_LOCALID"},
       {},
       {"SLURM_JOB_ID", "SLURM_STEP_ID"},
       "SLURM_RESTART_COUNT",
       "SLURM_STEP_TASKS_PER_NODE",
       "SLURM_NODEID"},
  };
  return kLaunchers;
}

/// Tell a rank, but not of how many. PMIX_RANK comes with the variables of the launcher that used PMIx.
const std::vector<std::string>& ranks_without_size() {
  static const std::vector<std::string> kRanks = {"PMIX_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK"};
  return kRanks;
}

/// Open MPI sets PMIX_RANK even in a process that it did not start, when that calls MPI_Init; then this is 1.
constexpr const char* kOpenMpiSize = "OMPI_MCA_orte_ess_num_procs";

constexpr const char* kRemedy =
    "; set TESSERA_RANK and TESSERA_WORLD_SIZE, or TESSERA_LAUNCHER (none: a world of one process)";

constexpr std::string_view kParent = "parent-";

using Setting = std::pair<std::string, std::string>;  ///< name and value

std::optional<Setting> first_set(const EnvReader& read, const std::vector<std::string>& names) {
  for (const std::string& name : names)
    if (auto value = read(name)) return Setting(name, *value);
  return std::nullopt;
}

bool present(const EnvReader& read, const Launcher& launcher) {
  for (const std::string& mark : launcher.marks)
    if (!read(mark)) return false;
  return first_set(read, launcher.rank) || first_set(read, launcher.size);
}

/// The values of all the launcher's variables, for errors: "RANK=2, WORLD_SIZE is not set".
std::string findings(const EnvReader& read, const Launcher& launcher) {
  std::string text;
  for (const auto* names : {&launcher.rank, &launcher.size, &launcher.local_rank, &launcher.local_size})
    for (const std::string& name : *names) {
      const auto value = read(name);
      text += (text.empty() ? "" : ", ") + name + (value ? "=" + *value : " is not set");
    }
  for (const std::string& name : {launcher.per_node, launcher.node})
    if (const auto value = name.empty() ? std::nullopt : read(name)) text += ", " + name + "=" + *value;
  return text;
}

int whole(const Setting& setting, int low) {
  return static_cast<int>(parse_integer(setting.second, setting.first, low, 1 << 20));
}

/// The number of ranks on node `node` in a list such as "2(x3),1": two on each of three nodes, one on the next. Empty:
/// the list has no such node.
std::optional<int> ranks_on_node(const Setting& list, int node) {
  for (std::size_t at = 0; at < list.second.size();) {
    const std::size_t end = std::min(list.second.find(',', at), list.second.size());
    const std::string entry = list.second.substr(at, end - at);
    const std::size_t times = entry.find("(x");
    const bool repeated = times != std::string::npos && entry.back() == ')';
    const int ranks = whole({list.first, repeated ? entry.substr(0, times) : entry}, 1);
    node -= repeated ? whole({list.first, entry.substr(times + 2, entry.size() - times - 3)}, 1) : 1;
    if (node < 0) return ranks;
    at = end + 1;
  }
  return std::nullopt;
}

std::optional<int> local_size_of(const EnvReader& read, const Launcher& launcher) {
  if (const auto size = first_set(read, launcher.local_size)) return whole(*size, 1);
  if (launcher.per_node.empty()) return std::nullopt;
  const auto list = first_set(read, {launcher.per_node});
  const auto node = first_set(read, {launcher.node});
  return list && node ? ranks_on_node(*list, whole(*node, 0)) : std::nullopt;
}

/// The launchers that tell this rank and number of ranks, the chosen one first: one tells what another leaves out, as
/// Slurm where its plug-in for PMI sets rank and size only.
std::vector<const Launcher*> agreeing(const EnvReader& read, const Launcher& chosen, const Launch& launch) {
  std::vector<const Launcher*> all = {&chosen};
  for (const Launcher& other : launchers()) {
    if (&other == &chosen || !present(read, other)) continue;
    const auto rank = first_set(read, other.rank);
    const auto size = first_set(read, other.size);
    if (rank && size && rank->second == std::to_string(launch.rank) && size->second == std::to_string(launch.size))
      all.push_back(&other);
  }
  return all;
}

/// Sets the local rank and number of ranks.
void place_on_host(const EnvReader& read, const Launcher& chosen, Launch& launch) {
  std::optional<int> local_rank;
  std::optional<int> local_size;
  std::string found;
  for (const Launcher* teller : agreeing(read, chosen, launch)) {
    found += (found.empty() ? "" : "; ") + std::string(teller->name) + " launcher: " + findings(read, *teller);
    if (const auto rank = first_set(read, teller->local_rank); rank && !local_rank) local_rank = whole(*rank, 0);
    if (!local_size) local_size = local_size_of(read, *teller);
  }
  launch.local_rank = local_rank.value_or(launch.rank);
  launch.local_size = local_size.value_or(launch.size);
  if (launch.local_size > launch.size)
    throw InvalidUsage(found + "; there can't be more ranks on this host than ranks");
  if (launch.local_rank >= launch.local_size)
    throw InvalidUsage(found + "; the local rank must be below the number of local ranks");
}

Launch launch_of(const EnvReader& read, const Launcher& launcher) {
  const auto rank = first_set(read, launcher.rank);
  const auto size = first_set(read, launcher.size);
  const std::string found = std::string(launcher.name) + " launcher: " + findings(read, launcher);
  if (!rank || !size) throw InvalidUsage(found + "; rank and number of ranks must both be set" + kRemedy);
  Launch launch;
  launch.launcher = launcher.name;
  launch.rank = whole(*rank, 0);
  launch.size = whole(*size, 1);
  if (launch.rank >= launch.size) throw InvalidUsage(found + "; the rank must be below the number of ranks");
  place_on_host(read, launcher, launch);
  const auto restart = launcher.restart.empty() ? std::nullopt : first_set(read, {launcher.restart});
  if (restart) launch.restart = static_cast<std::uint64_t>(whole(*restart, 0));
  if (const auto run = read(std::string(env::kRunId.name))) {
    launch.job = *run + (restart ? "." + restart->second : "");
    return launch;
  }
  for (const std::string& name : launcher.job)
    if (const auto value = read(name)) launch.job += (launch.job.empty() ? "" : ".") + *value;
  return launch;
}

/// True unless the text is a number up to `limit`.
bool above(const std::string& text, int limit) {
  int number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error != std::errc() || rest != end || number > limit;
}

/// The variables that tell that this process is one of several, as "PMIX_RANK=2, LOCAL_RANK=0"; "": none. `chosen` says
/// that it is alone, so that only what contradicts counts; null: no launcher was found.
std::string signs_of_several(const EnvReader& read, const Launcher* chosen) {
  std::string signs;
  const auto look = [&](const std::vector<std::string>& names, int limit) {
    for (const std::string& name : names)
      if (const auto value = read(name); value && above(*value, limit))
        signs += (signs.empty() ? "" : ", ") + name + "=" + *value;
  };
  for (const Launcher& other : launchers()) {
    if (&other == chosen) continue;
    const int limit = chosen != nullptr || !other.marks.empty() ? 0 : -1;  // any rank is a sign, or any but 0
    look(other.rank, limit);
    look(other.size, 1);
    look(other.local_rank, limit);
    look(other.local_size, 1);
  }
  if (read(kOpenMpiSize) != "1") look(ranks_without_size(), chosen != nullptr ? 0 : -1);
  return signs;
}

/// A world of one that another variable contradicts would be one of many such worlds.
void require_alone(const EnvReader& read, const Launcher* chosen) {
  const std::string signs = signs_of_several(read, chosen);
  if (signs.empty()) return;
  if (chosen == nullptr)
    throw InvalidUsage("launcher: " + signs +
                       " tells that this process is one of several, but not which one of how many" + kRemedy);
  throw InvalidUsage(std::string(chosen->name) + " launcher: " + findings(read, *chosen) +
                     ": a world of one process, but " + signs + " tells that it is one of several" + kRemedy);
}

}  // namespace

Launch resolve_launch(const EnvReader& read) {
  const auto forced = read(std::string(env::kLauncher.name));
  const Launcher& own_launcher = launchers().front();
  if (const auto rank = first_set(read, own_launcher.local_rank)) whole(*rank, 0);
  if (const auto size = first_set(read, own_launcher.local_size)) whole(*size, 1);
  if (forced == "none") return {};
  for (const Launcher& launcher : launchers()) {
    if (forced ? *forced != launcher.name : !present(read, launcher)) continue;
    Launch launch = launch_of(read, launcher);
    const bool own = &launcher == &launchers().front();
    if (launch.size == 1 && !own && !forced) require_alone(read, &launcher);
    return launch;
  }
  if (!forced) {
    require_alone(read, nullptr);
    return {};
  }
  std::string known = "none";
  for (const Launcher& launcher : launchers()) known += " " + std::string(launcher.name);
  throw InvalidUsage(std::string(env::kLauncher.name) + ": unknown launcher '" + *forced + "'; known: " + known);
}

Launch resolve_launch() {
  Launch launch = resolve_launch([](const std::string& name) { return read_foreign_env(name); });
  // Ranks of one launcher on one host have one parent, which identifies the job if the launcher provides no better
  // name.
  if (launch.size > 1 && launch.job.empty()) {
    launch.job = std::string(kParent) + std::to_string(::getppid());
    launch.job_is_local = true;
  }
  return launch;
}

std::vector<std::string> rank_variables() {
  std::vector<std::string> all = ranks_without_size();
  for (const Launcher& launcher : launchers())
    if (launcher.marks.empty())
      for (const auto* names : {&launcher.rank, &launcher.size, &launcher.local_rank, &launcher.local_size})
        all.insert(all.end(), names->begin(), names->end());
  return all;
}

}  // namespace tessera::comm
