// Several ranks on one GPU, which NCCL allows only with settings of its own.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "backends/nccl/api.h"

namespace tessera::comm::nccl {

struct NcclSetting {
  std::string name, value;
};

/// Whether two ranks name the same GPU.
bool share_gpu(std::span<const std::string> gpus);

/// What NCCL of this version needs where ranks share a GPU. From 2.30 on it supports them. An older one refuses two
/// ranks with one GPU unless they seem to be on different hosts; their data then passes through sockets.
/// `one_host`: all ranks are on one, so that the sockets are the loopback's.
std::vector<NcclSetting> settings_for_shared_gpu(int version, int rank, bool one_host);

/// Sets the environment variables that the program's user has not set. Before the first call that reads them, which is
/// ncclGetUniqueId() on rank 0.
void allow_shared_gpu(const NcclApi& api, int rank, bool one_host);

}  // namespace tessera::comm::nccl
