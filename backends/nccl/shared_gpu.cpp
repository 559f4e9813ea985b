#include "backends/nccl/shared_gpu.h"

#include <set>

namespace tessera::comm::nccl {

bool share_gpu(std::span<const std::string> gpus) {
  return std::set<std::string>(gpus.begin(), gpus.end()).size() < gpus.size();
}

std::vector<NcclSetting> settings_for_shared_gpu(int version, int rank, bool one_host) {
  if (version >= NCCL_VERSION(2, 30, 0))
    return {{"NCCL_MULTI_RANK_GPU_ENABLE", "1"}, {"NCCL_NVLS_ENABLE", "0"}, {"NCCL_MAX_CTAS", "2"}};
  std::vector<NcclSetting> settings{{"NCCL_HOSTID", "r" + std::to_string(rank)}, {"NCCL_IB_DISABLE", "1"}};
  if (one_host) settings.push_back({"NCCL_SOCKET_IFNAME", "lo"});
  return settings;
}

void allow_shared_gpu(const NcclApi& api, int rank, bool one_host) {
  int version = 0;
  api.ncclGetVersion(&version);
  for (const NcclSetting& setting : settings_for_shared_gpu(version, rank, one_host))
    api.setenv(setting.name.c_str(), setting.value.c_str(), 0);
}

}  // namespace tessera::comm::nccl
