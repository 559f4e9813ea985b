// comm's environment variables, each declared once.
#pragma once

#include "tessera/base/env.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm::env {

inline constexpr EnvVariable kBackend{
    "TESSERA_BACKEND", TESSERA_DEFAULT_BACKEND,
    "which backend carries the collectives; unknown names are an error that lists all"};
inline constexpr EnvVariable kRank{"TESSERA_RANK", "",
                                   "this process's rank; with TESSERA_WORLD_SIZE it overrides the launcher's"};
inline constexpr EnvVariable kWorldSize{"TESSERA_WORLD_SIZE", "", "number of ranks"};
inline constexpr EnvVariable kLocalRank{"TESSERA_LOCAL_RANK", "", "rank on this host; default: the rank"};
inline constexpr EnvVariable kLocalWorldSize{"TESSERA_LOCAL_WORLD_SIZE", "",
                                             "ranks on this host; default: the number of ranks"};
inline constexpr EnvVariable kRunId{"TESSERA_RUN_ID", "",
                                    "what the ranks of one run have in common and no other run of this user has"};
inline constexpr EnvVariable kMaster{
    "TESSERA_MASTER", "", "host:port where rank 0 listens; ranks on several hosts need it, and TESSERA_TOKEN"};
inline constexpr EnvVariable kToken{"TESSERA_TOKEN", "",
                                    "secret that the ranks of one run share; tessera's launcher makes one"};
inline constexpr EnvVariable kHostId{
    "TESSERA_HOST_ID", "", "name of this host; equal names share memory; default: boot id and network namespace"};
inline constexpr EnvVariable kLauncher{"TESSERA_LAUNCHER", "",
                                       "forces a launcher: tessera, torchrun, openmpi, pmi, slurm or none"};
inline constexpr EnvVariable kTimeout{"TESSERA_TIMEOUT", "5m",
                                      "how long an operation, or the start, waits for the other ranks"};
inline constexpr EnvVariable kDeterministic{
    "TESSERA_DETERMINISTIC", "",
    "1: sums follow one tree over the ranks, the same bits everywhere; default: 1, on backends that can't yet 0"};
inline constexpr EnvVariable kCheck{"TESSERA_CHECK", "0",
                                    "compare what the ranks call before an operation counts as done"};
inline constexpr EnvVariable kCma{
    "TESSERA_CMA", "1",
    "ranks of a host read each other's ordinary memory by way of the kernel where it lets "
    "them; 0: through memory that they share"};
inline constexpr EnvVariable kDeviceIpc{
    "TESSERA_DEVICE_IPC", "1",
    "ranks of a host read each other's device memory directly (CUDA IPC) where devices and system let them; 0: through "
    "the host's memory"};
inline constexpr EnvVariable kAlgo{
    "TESSERA_ALGO", "",
    "algorithms by operation and size, such as all_reduce=symmetric:0-16K;direct:16K-max, or @FILE that holds them"};
inline constexpr EnvVariable kPluginPath{
    "TESSERA_PLUGIN_PATH", "", "where to look for further modules: folders or .so files, separated by colons"};

}  // namespace tessera::comm::env
