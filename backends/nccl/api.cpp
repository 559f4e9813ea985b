#include "backends/nccl/api.h"

#include <dlfcn.h>

#include <initializer_list>
#include <set>

namespace tessera::comm::nccl {
namespace {

constexpr int kOldest = NCCL_VERSION(2, 18, 1);  // ncclCommSplit

/// Null, with a reason in `problem`, if none of the names can be loaded.
void* open_first(std::initializer_list<const char*> names, std::string& problem) {
  for (const char* name : names) {
    if (void* library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
    const char* why = ::dlerror();
    if (problem.empty()) problem = why != nullptr ? why : name;
  }
  return nullptr;
}

template <class Function>
bool resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

LoadedApi load() {
  // A kernel that CUDA loads at its first launch can wait for NCCL's kernels, and those for another rank.
  ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  LoadedApi loaded;
  std::string problem;
  void* const cuda = open_first({"libcudart.so.13", "libcudart.so.12"}, problem);
  void* const nccl = cuda != nullptr ? open_first({"libnccl.so.2"}, problem) : nullptr;
  if (nccl == nullptr) {
    loaded.problem = problem;
    return loaded;
  }
  std::string missing;
  const auto need = [&](bool found, const char* name) {
    if (!found && missing.empty()) missing = name;
  };
#define TESSERA_NEED_NCCL(name) need(resolve(nccl, #name, loaded.api.name), #name);
#define TESSERA_TRY_NCCL(name) resolve(nccl, #name, loaded.api.name);
#define TESSERA_NEED_CUDA(name) need(resolve(cuda, #name, loaded.api.name), #name);
  TESSERA_NCCL_FUNCTIONS(TESSERA_NEED_NCCL, TESSERA_TRY_NCCL)
  TESSERA_CUDA_FUNCTIONS(TESSERA_NEED_CUDA)
  TESSERA_TRY_NCCL(ncclCommRevoke)
  TESSERA_TRY_NCCL(ncclCommWindowRegister)
  TESSERA_TRY_NCCL(ncclCommWindowDeregister)
  TESSERA_NEED_CUDA(cudaMalloc)
  TESSERA_NEED_CUDA(cudaHostAlloc)
#undef TESSERA_NEED_NCCL
#undef TESSERA_TRY_NCCL
#undef TESSERA_NEED_CUDA
  if (void* const driver = open_first({"libcuda.so.1"}, problem))
    resolve(driver, "cuDevicePrimaryCtxGetState", loaded.api.cuDevicePrimaryCtxGetState);
  loaded.api.tree = tree_kernels();
  if (missing.empty()) return loaded;
  loaded.problem = "the libraries lack " + missing + "; needs NCCL " + version_text(kOldest) + " or newer";
  return loaded;
}

}  // namespace

const LoadedApi& loaded_api() {
  static const LoadedApi kLoaded = load();
  return kLoaded;
}

std::string version_text(int code) {
  return std::to_string(code / 10000) + "." + std::to_string(code / 100 % 100) + "." + std::to_string(code % 100);
}

std::string unusable(const NcclApi& api) {
  int version = 0;
  if (api.ncclGetVersion(&version) != ncclSuccess || version < kOldest)
    return "NCCL is version " + version_text(version) + ", needs " + version_text(kOldest) + " or newer";
  int devices = 0;
  const cudaError_t error = api.cudaGetDeviceCount(&devices);
  if (error != cudaSuccess) {
    api.cudaGetLastError();  // else the next call reports the error again
    return std::string("no CUDA device: ") + api.cudaGetErrorString(error);
  }
  return devices > 0 ? "" : "no CUDA device: the driver sees none";
}

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
