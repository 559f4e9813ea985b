// Random subsets and contradictions of the variables of several launchers.
#include <algorithm>
#include <array>
#include <random>
#include <set>

#include "tests/comm/launch_environment.h"

namespace tessera::comm_test {
namespace {

/// The variables by which a launcher tells rank, size, local rank and local size ("": it does not), and its others.
struct Dialect {
  std::string launcher;
  std::array<std::string, 4> place;
  std::vector<std::string> others;
};

const std::vector<Dialect> kDialects = {
    {"tessera", {"TESSERA_RANK", "TESSERA_WORLD_SIZE", "TESSERA_LOCAL_RANK", "TESSERA_LOCAL_WORLD_SIZE"}, {}},
    {"torchrun", {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, {"MASTER_PORT"}},
    {"openmpi",
     {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
     {"PMIX_NAMESPACE"}},
    {"mvapich",
     {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
     {"MPIRUN_ID"}},
    {"pmi", {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, {"PMI_JOBID"}},
    {"slurm", {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ""}, {"SLURM_STEP_ID", "SLURM_JOB_ID"}},
    {"pmix", {"PMIX_RANK", "", "", ""}, {}}};

/// What one launcher tells the ranks of a job, without the `missing` variables: their places in the job, or in a world
/// around it.
struct Telling {
  enum class World { job, of_one, larger };
  Dialect dialect;
  World world = World::job;
  std::set<std::string> missing;

  bool tells_rank_or_size() const {
    return world != World::of_one && (!missing.contains(dialect.place[0]) || !missing.contains(dialect.place[1]));
  }
};

/// A job of several ranks with one to three launchers.
class RandomJob {
 public:
  explicit RandomJob(unsigned seed) : random_(seed) {
    local_ = between(1, 3);
    ranks_ = local_ * between(local_ == 1 ? 2 : 1, 3);
    std::vector<Dialect> dialects = kDialects;
    std::shuffle(dialects.begin(), dialects.end(), random_);
    for (int i = between(1, 3); i > 0; --i) {
      Telling telling{dialects[static_cast<std::size_t>(i)], Telling::World::job, {""}};
      // TESSERA_RANK may say at will that a process is alone.
      if (telling.dialect.launcher != "tessera" && between(0, 2) == 0)
        telling.world = between(0, 1) == 0 ? Telling::World::of_one : Telling::World::larger;
      for (const std::string& name : variables(telling.dialect))
        if (between(0, 3) == 0) telling.missing.insert(name);
      tellings_.push_back(telling);
    }
  }

  int ranks() const { return ranks_; }
  const std::vector<Telling>& tellings() const { return tellings_; }

  /// Rank, size, local rank and local size as the launcher tells them to a rank of the job.
  std::array<int, 4> place(const Telling& telling, int rank) const {
    if (telling.world == Telling::World::of_one) return {0, 1, 0, 1};
    if (telling.world == Telling::World::larger) return {rank + 1, ranks_ + 3, rank + 1, ranks_ + 3};
    return {rank, ranks_, rank % local_, local_};
  }

  Environment environment(int rank) const {
    Environment all;
    for (const Telling& telling : tellings_) {
      const auto numbers = place(telling, rank);
      const auto& names = telling.dialect.place;
      for (std::size_t i = 0; i < names.size(); ++i) all[names[i]] = std::to_string(numbers[i]);
      for (const std::string& name : telling.dialect.others) all[name] = "7";
      for (const std::string& name : telling.missing) all.erase(name);
    }
    return all;
  }

 private:
  static std::vector<std::string> variables(const Dialect& dialect) {
    std::vector<std::string> all(dialect.place.begin(), dialect.place.end());
    all.insert(all.end(), dialect.others.begin(), dialect.others.end());
    return all;
  }
  int between(int low, int high) { return std::uniform_int_distribution<>(low, high)(random_); }

  std::mt19937 random_;
  int local_ = 1;
  int ranks_ = 2;
  std::vector<Telling> tellings_;
};

using Resolve = std::function<Launch(const Environment&)>;

/// "" if a rank of the job gets its place in a world that it was told, or one line that names what is set; else what is
/// wrong. `alone` is set if it gets a world of one.
std::string judge(const RandomJob& job, int rank, const Resolve& resolve_one, bool& alone) {
  const Environment environment = job.environment(rank);
  Launch launch;
  const std::string error = error_of([&] { launch = resolve_one(environment); });
  if (!error.empty()) {
    const bool named = std::any_of(environment.begin(), environment.end(), [&](const auto& one) {
      return error.find(one.first + "=" + one.second) != std::string::npos;
    });
    return named && error.starts_with("InvalidUsage: ") && error.find('\n') == std::string::npos ? "" : error;
  }
  alone = launch.size == 1;
  for (const Telling& telling : job.tellings()) {
    const auto [told_rank, size, local_rank, local_size] = job.place(telling, rank);
    if (launch.launcher != telling.dialect.launcher || launch.rank != told_rank || launch.size != size) continue;
    const bool right_local = launch.local_rank == local_rank || launch.local_rank == told_rank;
    return right_local && (launch.local_size == local_size || launch.local_size == size) ? "" : "wrong local place";
  }
  return launch.launcher == "none" ? "" : "a place that nobody told";
}

/// The first fault among `jobs` random jobs; "" if none. Only rank 0 may be alone in a job of which a launcher tells:
/// the environment of a batch script is that of rank 0.
std::string fault_of(const Resolve& resolve_one, unsigned first, unsigned jobs) {
  for (unsigned seed = first; seed < first + jobs; ++seed) {
    const RandomJob job(seed);
    const auto& tellings = job.tellings();
    const bool told =
        std::any_of(tellings.begin(), tellings.end(), [](const auto& t) { return t.tells_rank_or_size(); });
    for (int rank = 0; rank < job.ranks(); ++rank) {
      bool alone = false;
      std::string fault = judge(job, rank, resolve_one, alone);
      if (fault.empty() && told && alone && rank > 0) fault = "alone";
      if (fault.empty()) continue;
      fault = "seed " + std::to_string(seed) + ", rank " + std::to_string(rank) + ": " + fault + ":";
      for (const auto& [name, value] : job.environment(rank)) fault += " " + name + "=" + value;
      return fault;
    }
  }
  return "";
}

/// By hand: test_comm --gtest_filter=ResolveLaunchRandom.* --gtest_repeat=1000. Each repetition has jobs of its own.
TEST(ResolveLaunchRandom, IsRightOrOneLineAndNeverManyWorldsOfOne) {
  static unsigned repetition = 0;
  constexpr unsigned kJobs = 20000;
  EXPECT_EQ(fault_of(resolve, repetition++ * kJobs, kJobs), "");
}

TEST(ResolveLaunchRandom, SeesAWorldOfOneThatShouldBeAnError) {
  const auto falls_back = [](const Environment& environment) {
    try {
      return resolve(environment);
    } catch (const InvalidUsage&) {
      return Launch{};
    }
  };
  EXPECT_NE(fault_of(falls_back, 0, 100).find(": alone:"), std::string::npos);
}

}  // namespace
}  // namespace tessera::comm_test
