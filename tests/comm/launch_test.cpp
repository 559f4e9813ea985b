#include "tessera/comm/launch.h"

#include "tests/comm/launch_environment.h"

namespace tessera::comm_test {
namespace {

struct Row {
  const char* name;
  Environment environment;
  Launch expected;
};

class ResolveLaunch : public testing::TestWithParam<Row> {};

TEST_P(ResolveLaunch, FindsRankAndSize) {
  const Launch launch = resolve(GetParam().environment);
  const Launch& expected = GetParam().expected;
  EXPECT_EQ(launch.launcher, expected.launcher);
  EXPECT_EQ(launch.rank, expected.rank);
  EXPECT_EQ(launch.size, expected.size);
  EXPECT_EQ(launch.local_rank, expected.local_rank);
  EXPECT_EQ(launch.local_size, expected.local_size);
  EXPECT_EQ(launch.job, expected.job);
  EXPECT_EQ(launch.restart, expected.restart);
}

const Environment kTorchrun = {{"RANK", "3"},
                               {"WORLD_SIZE", "4"},
                               {"LOCAL_RANK", "1"},
                               {"LOCAL_WORLD_SIZE", "2"},
                               {"MASTER_ADDR", "10.0.0.1"},
                               {"MASTER_PORT", "29500"},
                               {"TORCHELASTIC_RUN_ID", "abc"},
                               {"TORCHELASTIC_RESTART_COUNT", "2"}};
const Environment kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                              {"OMPI_COMM_WORLD_SIZE", "2"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"PMIX_NAMESPACE", "ns7"}};
const Environment kHydra = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
const Environment kSrun = {{"SLURM_PROCID", "6"},  {"SLURM_STEP_NUM_TASKS", "12"},
                           {"SLURM_STEP_ID", "7"}, {"SLURM_JOB_ID", "42"},
                           {"SLURM_NTASKS", "99"}, {"SLURM_STEP_TASKS_PER_NODE", "2(x3),5,1"},
                           {"SLURM_LOCALID", "0"}};
const Environment kMvapich = {{"MV2_COMM_WORLD_RANK", "2"},
                              {"MV2_COMM_WORLD_SIZE", "4"},
                              {"MV2_COMM_WORLD_LOCAL_RANK", "0"},
                              {"MV2_COMM_WORLD_LOCAL_SIZE", "2"},
                              {"MPIRUN_ID", "1234"}};
const Environment kStepOfOne = {{"SLURM_PROCID", "0"},  {"SLURM_LOCALID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"},
                                {"SLURM_STEP_ID", "0"}, {"SLURM_JOB_ID", "42"}, {"PMIX_RANK", "0"}};
const Environment kMpirunOfOne = {
    {"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "1"}, {"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "ns7"}};
const Environment kSingleton = {
    {"PMIX_RANK", "0"}, {"PMIX_NAMESPACE", "9"}, {"OMPI_MCA_ess", "singleton"}, {"OMPI_MCA_orte_ess_num_procs", "1"}};
const Environment kNamed = {{"TESSERA_RUN_ID", "mine"}};

/// The union of both; b takes precedence.
Environment both(const Environment& a, Environment b) {
  b.insert(a.begin(), a.end());
  return b;
}

INSTANTIATE_TEST_SUITE_P(
    Table, ResolveLaunch,
    testing::Values(
        Row{"nothing", {}, {"none", 0, 1, 0, 1, ""}},
        Row{"own",
            {{"TESSERA_RANK", "2"}, {"TESSERA_WORLD_SIZE", "3"}, {"TESSERA_RUN_ID", "r"}},
            {"tessera", 2, 3, 2, 3, "r"}},
        Row{"torchrun", kTorchrun, {"torchrun", 3, 4, 1, 2, "29500.abc.2", false, 2}},
        Row{"openmpi", kOpenMpi, {"openmpi", 1, 2, 1, 2, "ns7"}},
        Row{"own_wins",
            both(kTorchrun, {{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "2"}}),
            {"tessera", 0, 2, 0, 2, ""}},
        Row{"torchrun_inside_mpirun", both(kTorchrun, kOpenMpi), {"torchrun", 3, 4, 1, 2, "29500.abc.2", false, 2}},
        Row{"hydra", kHydra, {"pmi", 1, 4, 1, 4, ""}},
        Row{"pals",
            {{"PALS_RANKID", "5"},
             {"PMI_SIZE", "8"},
             {"PALS_LOCAL_RANKID", "1"},
             {"PALS_LOCAL_SIZE", "4"},
             {"PALS_APID", "x"}},
            {"pmi", 5, 8, 1, 4, "x"}},
        Row{"srun",
            {{"SLURM_PROCID", "2"},
             {"SLURM_STEP_NUM_TASKS", "4"},
             {"SLURM_LOCALID", "0"},
             {"SLURM_STEP_TASKS_PER_NODE", "2(x2)"},
             {"SLURM_NODEID", "1"},
             {"SLURM_STEP_ID", "7"},
             {"SLURM_JOB_ID", "42"}},
            {"slurm", 2, 4, 0, 2, "42.7"}},
        Row{"srun_uneven_nodes",
            both(kSrun, {{"SLURM_NODEID", "3"}, {"SLURM_LOCALID", "4"}}),
            {"slurm", 6, 12, 4, 5, "42.7"}},
        Row{"srun_last_node", both(kSrun, {{"SLURM_NODEID", "4"}}), {"slurm", 6, 12, 0, 1, "42.7"}},
        Row{"srun_requeued",
            both(kSrun, {{"SLURM_NODEID", "0"}, {"SLURM_RESTART_COUNT", "1"}}),
            {"slurm", 6, 12, 0, 2, "42.7", false, 1}},
        Row{"srun_without_nodes",
            {{"SLURM_PROCID", "2"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_ID", "7"}, {"SLURM_JOB_ID", "42"}},
            {"slurm", 2, 4, 2, 4, "42.7"}},
        // A shell in a step of one task: a world of one, although the job has four.
        Row{"srun_shell",
            {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}, {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"}},
            {"slurm", 0, 1, 0, 1, "0"}},
        // Slurm's plug-in for PMI sets rank and size only: Slurm itself tells the rest.
        Row{"srun_with_pmi2",
            both(kSrun, {{"PMI_RANK", "6"}, {"PMI_SIZE", "12"}, {"PMI_JOBID", "42.7"}, {"SLURM_NODEID", "3"}}),
            {"pmi", 6, 12, 0, 5, "42.7"}},
        Row{"rank_from_slurm_by_hand",
            both(kSrun, {{"RANK", "6"}, {"WORLD_SIZE", "12"}, {"SLURM_NODEID", "4"}}),
            {"torchrun", 6, 12, 0, 1, ""}},
        Row{"own_rank_from_mpirun",
            both(kOpenMpi, {{"TESSERA_RANK", "1"}, {"TESSERA_WORLD_SIZE", "2"}}),
            {"tessera", 1, 2, 1, 2, ""}},
        Row{"own_local_rank_wins",
            both(kOpenMpi, {{"TESSERA_RANK", "1"}, {"TESSERA_WORLD_SIZE", "2"}, {"TESSERA_LOCAL_RANK", "0"}}),
            {"tessera", 1, 2, 0, 2, ""}},
        Row{"no_local_rank_of_another_world",
            both(kSrun, {{"PMI_RANK", "3"}, {"PMI_SIZE", "12"}}),
            {"pmi", 3, 12, 3, 12, ""}},
        Row{"srun_with_pmix", both(kSrun, {{"PMIX_RANK", "6"}, {"SLURM_NODEID", "3"}}), {"slurm", 6, 12, 0, 5, "42.7"}},
        Row{"mvapich", kMvapich, {"mvapich", 2, 4, 0, 2, "1234"}},
        Row{"mvapich_before_pmi",
            both(kMvapich, {{"PMI_RANK", "2"}, {"PMI_SIZE", "4"}}),
            {"mvapich", 2, 4, 0, 2, "1234"}},
        Row{"mvapich_in_a_step_of_one", both(kMvapich, kStepOfOne), {"mvapich", 2, 4, 0, 2, "1234"}},
        Row{"mpirun_in_a_step_of_one", both(kOpenMpi, kStepOfOne), {"openmpi", 1, 2, 1, 2, "ns7"}},
        Row{"hydra_in_a_step_of_one", both(kHydra, kStepOfOne), {"pmi", 1, 4, 1, 4, ""}},
        Row{"torchrun_in_a_step_of_one",
            both(kTorchrun, kStepOfOne),
            {"torchrun", 3, 4, 1, 2, "29500.abc.2", false, 2}},
        // Without torchrun's agent, as under Kubernetes.
        Row{"kubernetes_first",
            {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "23456"}},
            {"torchrun", 0, 2, 0, 2, "23456"}},
        Row{"kubernetes_other",
            {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "job-master-0"}, {"MASTER_PORT", "23456"}},
            {"torchrun", 1, 2, 1, 2, "23456"}},
        Row{"named_torchrun", both(kTorchrun, kNamed), {"torchrun", 3, 4, 1, 2, "mine.2", false, 2}},
        Row{"named_openmpi", both(kOpenMpi, kNamed), {"openmpi", 1, 2, 1, 2, "mine"}},
        Row{"named_mvapich", both(kMvapich, kNamed), {"mvapich", 2, 4, 0, 2, "mine"}},
        Row{"named_hydra", both(kHydra, kNamed), {"pmi", 1, 4, 1, 4, "mine"}},
        Row{"named_srun", both(both(kSrun, kNamed), {{"SLURM_NODEID", "0"}}), {"slurm", 6, 12, 0, 2, "mine"}},
        // Open MPI's MPI_Init sets these in a process that no launcher started.
        Row{"openmpi_singleton", kSingleton, {"none", 0, 1, 0, 1, ""}},
        Row{"openmpi_singleton_in_a_step",
            both(both(kSrun, kSingleton), {{"SLURM_NODEID", "0"}}),
            {"slurm", 6, 12, 0, 2, "42.7"}},
        Row{"mpirun_of_one", both(kMpirunOfOne, kStepOfOne), {"openmpi", 0, 1, 0, 1, "ns7"}},
        Row{"mpirun_of_one_in_a_batch_job",
            both(kMpirunOfOne, {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}}),
            {"openmpi", 0, 1, 0, 1, "ns7"}},
        Row{"mpirun_of_one_inside_torchrun_by_request",
            both(both(kTorchrun, kMpirunOfOne), {{"TESSERA_LAUNCHER", "openmpi"}}),
            {"openmpi", 0, 1, 0, 1, "ns7"}},
        Row{"own_world_of_one_inside_mpirun",
            both(kOpenMpi, {{"TESSERA_RANK", "0"}, {"TESSERA_WORLD_SIZE", "1"}}),
            {"tessera", 0, 1, 0, 1, ""}},
        Row{"alone_although_pmix_rank", {{"PMIX_RANK", "2"}, {"TESSERA_LAUNCHER", "none"}}, {"none", 0, 1, 0, 1, ""}},
        Row{"no_local_rank_by_convention", {{"LOCAL_RANK", "-1"}}, {"none", 0, 1, 0, 1, ""}},
        Row{"mpirun_in_a_batch_job",
            both(kOpenMpi, {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "42"}}),
            {"openmpi", 1, 2, 1, 2, "ns7"}},
        Row{"hydra_in_a_step", both(kHydra, kSrun), {"pmi", 1, 4, 1, 4, ""}},
        Row{"openmpi_before_pmi", both(kOpenMpi, kHydra), {"openmpi", 1, 2, 1, 2, "ns7"}},
        Row{"openmpi_4", both(kOpenMpi, {{"OMPI_MCA_ess_base_jobid", "99"}}), {"openmpi", 1, 2, 1, 2, "ns7.99"}},
        Row{"cray_pmi",
            {{"PMI_RANK", "5"},
             {"PMI_SIZE", "8"},
             {"PMI_LOCAL_RANK", "1"},
             {"PMI_LOCAL_SIZE", "4"},
             {"PMI_JOBID", "j"}},
            {"pmi", 5, 8, 1, 4, "j"}},
        Row{"torchrun_first_start",
            {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "abc"}, {"TORCHELASTIC_RESTART_COUNT", "0"}},
            {"torchrun", 0, 2, 0, 2, "abc.0"}},
        Row{"torchrun_in_a_step", both(kTorchrun, kSrun), {"torchrun", 3, 4, 1, 2, "29500.abc.2", false, 2}},
        Row{"empty_is_unset", {{"RANK", ""}, {"WORLD_SIZE", ""}}, {"none", 0, 1, 0, 1, ""}},
        // A batch script's own environment: a world of one, not a wait for three absent ranks.
        Row{"sbatch",
            {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_JOB_ID", "42"}},
            {"none", 0, 1, 0, 1, ""}},
        // The shell of salloc is a step of one task, whose environment keeps the job's number of tasks.
        Row{"salloc",
            {{"SLURM_PROCID", "0"},
             {"SLURM_LOCALID", "0"},
             {"SLURM_NTASKS", "4"},
             {"SLURM_STEP_NUM_TASKS", "1"},
             {"SLURM_STEP_ID", "4294967290"},
             {"SLURM_JOB_ID", "42"},
             {"SLURM_NODEID", "0"}},
            {"slurm", 0, 1, 0, 1, "42.4294967290"}},
        Row{"forced_none", both(kTorchrun, {{"TESSERA_LAUNCHER", "none"}}), {"none", 0, 1, 0, 1, ""}},
        Row{"forced_openmpi",
            both(both(kTorchrun, kOpenMpi), {{"TESSERA_LAUNCHER", "openmpi"}}),
            {"openmpi", 1, 2, 1, 2, "ns7"}}),
    [](const auto& row) { return row.param.name; });

constexpr const char* kRemedy =
    "; set TESSERA_RANK and TESSERA_WORLD_SIZE, or TESSERA_LAUNCHER (none: a world of one process)";

struct Wrong {
  const char* name;
  Environment environment;
  std::vector<std::string> says;
};

class ResolveLaunchErrors : public testing::TestWithParam<Wrong> {};

TEST_P(ResolveLaunchErrors, ListVariablesFound) {
  const std::string error = error_of([&] { resolve(GetParam().environment); });
  EXPECT_TRUE(error.starts_with("InvalidUsage")) << error;
  for (const std::string& part : GetParam().says) EXPECT_NE(error.find(part), std::string::npos) << error;
}

INSTANTIATE_TEST_SUITE_P(
    Table, ResolveLaunchErrors,
    testing::Values(
        Wrong{"rank_only", {{"RANK", "1"}}, {"torchrun", "RANK=1", "WORLD_SIZE is not set"}},
        Wrong{"size_only", {{"TESSERA_WORLD_SIZE", "4"}}, {"TESSERA_RANK is not set", "TESSERA_WORLD_SIZE=4"}},
        Wrong{"rank_too_high",
              {{"TESSERA_RANK", "4"}, {"TESSERA_WORLD_SIZE", "4"}},
              {"TESSERA_RANK=4", "; the rank must be below the number of ranks"}},
        Wrong{"not_a_number", {{"RANK", "one"}, {"WORLD_SIZE", "4"}}, {"RANK", "one"}},
        Wrong{"forced_but_absent", {{"TESSERA_LAUNCHER", "slurm"}}, {"SLURM_PROCID is not set"}},
        Wrong{"node_list_garbage",
              both(kSrun, {{"SLURM_STEP_TASKS_PER_NODE", "2(x"}, {"SLURM_NODEID", "0"}}),
              {"SLURM_STEP_TASKS_PER_NODE", "2(x"}},
        Wrong{"local_rank_too_high",
              both(kSrun, {{"SLURM_NODEID", "0"}, {"SLURM_LOCALID", "2"}}),
              {"SLURM_LOCALID=2", "SLURM_STEP_TASKS_PER_NODE=2(x3),5,1", "local rank"}},
        Wrong{"more_local_ranks_than_ranks",
              {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}},
              {"WORLD_SIZE=2", "LOCAL_WORLD_SIZE=4", "there can't be more ranks on this host than ranks"}},
        Wrong{"negative_rank", {{"TESSERA_RANK", "-1"}, {"TESSERA_WORLD_SIZE", "4"}}, {"TESSERA_RANK", "-1"}},
        Wrong{
            "step_without_size", {{"SLURM_PROCID", "0"}, {"SLURM_STEP_ID", "7"}}, {"SLURM_STEP_NUM_TASKS is not set"}},
        Wrong{"pmix_rank_alone", {{"PMIX_RANK", "0"}}, {"PMIX_RANK=0", kRemedy}},
        Wrong{"local_rank_alone", {{"LOCAL_RANK", "0"}}, {"LOCAL_RANK=0", kRemedy}},
        Wrong{"own_local_rank_alone", {{"TESSERA_LOCAL_RANK", "0"}}, {"TESSERA_LOCAL_RANK=0", kRemedy}},
        Wrong{"own_local_rank_negative", {{"TESSERA_LOCAL_RANK", "-1"}}, {"TESSERA_LOCAL_RANK: '-1'"}},
        Wrong{"own_local_size_zero", {{"TESSERA_LOCAL_WORLD_SIZE", "0"}}, {"TESSERA_LOCAL_WORLD_SIZE: '0'"}},
        Wrong{"mvapich_rank_alone", {{"MV2_COMM_WORLD_RANK", "0"}}, {"MV2_COMM_WORLD_SIZE is not set", kRemedy}},
        Wrong{"local_ranks_alone", {{"MPI_LOCALNRANKS", "2"}}, {"MPI_LOCALNRANKS=2", kRemedy}},
        Wrong{"slurm_task_without_a_step", {{"SLURM_PROCID", "1"}}, {"SLURM_PROCID=1", kRemedy}},
        Wrong{"slurm_tasks_without_a_step",
              {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}},
              {"SLURM_STEP_NUM_TASKS=4"}},
        Wrong{"garbage_alone", {{"FLUX_TASK_RANK", "zero"}}, {"FLUX_TASK_RANK=zero", kRemedy}},
        Wrong{"torchrun_of_one_inside_mpirun",
              both(kOpenMpi, {{"RANK", "0"}, {"WORLD_SIZE", "1"}}),
              {"torchrun launcher: RANK=0, WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=2", kRemedy}},
        Wrong{"mpirun_of_one_inside_a_step",
              both(kMpirunOfOne, {{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "4"}, {"SLURM_STEP_ID", "7"}}),
              {"openmpi launcher", "SLURM_STEP_NUM_TASKS=4", kRemedy}},
        Wrong{
            "step_of_one_with_another_rank", both(kStepOfOne, {{"PMIX_RANK", "1"}}), {"slurm launcher", "PMIX_RANK=1"}},
        Wrong{"unknown", {{"TESSERA_LAUNCHER", "prun"}}, {"prun", "torchrun", "none"}}),
    [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace tessera::comm_test
