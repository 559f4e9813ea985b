// comm's environment variables, each declared once.
#pragma once

#include "tessera/base/env.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm::env {

inline constexpr EnvVariable kBackend{"TESSERA_BACKEND", TESSERA_DEFAULT_BACKEND,
                                      "backend of the communicators; unknown names are an error that lists all"};
inline constexpr EnvVariable kRank{"TESSERA_RANK", "",
                                   "rank of this process; with TESSERA_WORLD_SIZE it overrides the launcher's"};
inline constexpr EnvVariable kWorldSize{"TESSERA_WORLD_SIZE", "", "number of ranks"};
inline constexpr EnvVariable kLocalRank{"TESSERA_LOCAL_RANK", "", "rank on this host; default: the rank"};
inline constexpr EnvVariable kLocalWorldSize{"TESSERA_LOCAL_WORLD_SIZE", "",
                                             "ranks on this host; default: the number of ranks"};
inline constexpr EnvVariable kRunId{
    "TESSERA_RUN_ID", "",
    "name of the run, the same on all its ranks and unique among the runs of this user; default: the launcher's"};
inline constexpr EnvVariable kMaster{"TESSERA_MASTER", "",
                                     "host:port on which rank 0 listens; several hosts need it and TESSERA_TOKEN"};
inline constexpr EnvVariable kToken{
    "TESSERA_TOKEN", "",
    "secret of a run's ranks: random, 128 bits (openssl rand -hex 16); default: tessera makes one"};
inline constexpr EnvVariable kTls{
    "TESSERA_TLS", "0",
    "1: TLS 1.3 encrypts the rendezvous and all data that leaves a host; an error where a backend can't"};
inline constexpr EnvVariable kTlsCert{"TESSERA_TLS_CERT", "",
                                      "PEM file with this rank's certificate; default: TLS authenticates by the token"};
inline constexpr EnvVariable kTlsKey{"TESSERA_TLS_KEY", "", "PEM file with the private key of TESSERA_TLS_CERT"};
inline constexpr EnvVariable kTlsCa{"TESSERA_TLS_CA", "",
                                    "PEM file with the authority's certificate, by which ranks verify each other's"};
inline constexpr EnvVariable kHostId{
    "TESSERA_HOST_ID", "",
    "name of this host; ranks with equal names share memory; default: boot id and network namespace"};
inline constexpr EnvVariable kLauncher{
    "TESSERA_LAUNCHER", "",
    "launcher to assume: tessera, torchrun, openmpi, mvapich, pmi, slurm or none; default: detected"};
inline constexpr EnvVariable kTimeout{"TESSERA_TIMEOUT", "5m", "timeout of the start and of every operation"};
inline constexpr EnvVariable kDeterministic{
    "TESSERA_DETERMINISTIC", "",
    "1: reductions follow one tree over the ranks, bitwise equal; default: 1 on backends that support it"};
inline constexpr EnvVariable kCheck{"TESSERA_CHECK", "0",
                                    "1: the ranks compare the signature of every operation before it completes"};
inline constexpr EnvVariable kFlightRecorder{
    "TESSERA_FLIGHT_RECORDER", "",
    "directory in which each rank records its last calls, for tessera report --postmortem; default: none"};
inline constexpr EnvVariable kCma{"TESSERA_CMA", "1",
                                  "use cross-memory attach between ranks of a host if permitted; 0: use shared memory"};
inline constexpr EnvVariable kDeviceIpc{
    "TESSERA_DEVICE_IPC", "1",
    "use CUDA IPC between ranks of a host if devices and system permit it; 0: use pinned host memory"};
inline constexpr EnvVariable kAlgo{
    "TESSERA_ALGO", "",
    "algorithms by operation and size: all_reduce=symmetric:0-16K;direct:16K-max, or @FILE with such lines"};
inline constexpr EnvVariable kPluginPath{"TESSERA_PLUGIN_PATH", "",
                                         "directories or .so files with further modules, separated by colons"};

}  // namespace tessera::comm::env
