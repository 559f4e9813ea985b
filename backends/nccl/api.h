// The functions of NCCL and CUDA, as a table that is filled when the libraries are loaded: the program starts without
// them, a newer library fits, and a test can insert its own functions.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstdlib>
#include <span>
#include <string>
#include <vector>

#include "backends/nccl/tree_kernels.h"
#include "tessera/comm/base_names.h"

/// All functions that this backend calls. R: required; O: null if the library is too old for it.
#define TESSERA_NCCL_FUNCTIONS(R, O) \
  R(ncclGetVersion)                  \
  R(ncclGetErrorString)              \
  R(ncclGetLastError)                \
  R(ncclGetUniqueId)                 \
  R(ncclCommInitRankConfig)          \
  R(ncclCommSplit)                   \
  R(ncclCommGetAsyncError)           \
  R(ncclCommFinalize)                \
  R(ncclCommDestroy)                 \
  R(ncclCommAbort)                   \
  R(ncclAllReduce)                   \
  R(ncclAllGather)                   \
  R(ncclReduceScatter)               \
  R(ncclBroadcast)                   \
  R(ncclReduce)                      \
  R(ncclSend)                        \
  R(ncclRecv)                        \
  R(ncclGroupStart)                  \
  R(ncclGroupEnd)                    \
  R(ncclRedOpCreatePreMulSum)        \
  R(ncclRedOpDestroy)                \
  O(ncclMemAlloc)                    \
  O(ncclMemFree)                     \
  O(ncclCommRegister)                \
  O(ncclCommDeregister)

#define TESSERA_CUDA_FUNCTIONS(R) \
  R(cudaGetErrorString)           \
  R(cudaGetLastError)             \
  R(cudaGetDeviceCount)           \
  R(cudaDeviceGetPCIBusId)        \
  R(cudaGetDevice)                \
  R(cudaSetDevice)                \
  R(cudaFree)                     \
  R(cudaFreeHost)                 \
  R(cudaMemcpyAsync)              \
  R(cudaMemsetAsync)              \
  R(cudaStreamCreateWithFlags)    \
  R(cudaStreamDestroy)            \
  R(cudaStreamWaitEvent)          \
  R(cudaEventCreateWithFlags)     \
  R(cudaEventDestroy)             \
  R(cudaEventRecord)              \
  R(cudaEventQuery)

namespace tessera::comm::nccl {

/// None of the functions makes the host wait for a device.
struct NcclApi {
#define TESSERA_MEMBER(name) decltype(&::name) name = nullptr;  // NOLINT(bugprone-macro-parentheses): declares it
  TESSERA_NCCL_FUNCTIONS(TESSERA_MEMBER, TESSERA_MEMBER)
  TESSERA_CUDA_FUNCTIONS(TESSERA_MEMBER)
#undef TESSERA_MEMBER
  // These two have overloads in C++.
  cudaError_t (*cudaMalloc)(void** data, std::size_t bytes) = nullptr;
  cudaError_t (*cudaHostAlloc)(void** data, std::size_t bytes, unsigned flags) = nullptr;
  /// Null if the library is too old for it. (Some headers that this builds with do not declare it.)
  ncclResult_t (*ncclCommRevoke)(ncclComm_t comm, int flags) = nullptr;
  /// Likewise; a window is an ncclWindow_t.
  ncclResult_t (*ncclCommWindowRegister)(ncclComm_t comm, void* data, std::size_t bytes, void** window,
                                         int flags) = nullptr;
  ncclResult_t (*ncclCommWindowDeregister)(ncclComm_t comm, void* window) = nullptr;
  /// Of the driver; its types are integers. Null if it can't be loaded.
  int (*cuDevicePrimaryCtxGetState)(int device, unsigned* flags, int* active) = nullptr;
  int (*setenv)(const char* name, const char* value, int overwrite) = ::setenv;
  const TreeKernels* tree = nullptr;  ///< this library's kernels; null if this build has none

  /// Whether memory of NCCL's own allocator is used and registered: from 2.26 on, since an older one rounds each
  /// allocation up to hundreds of MiB.
  bool registers() const {
    int version = 0;
    return ncclMemAlloc && ncclMemFree && ncclCommRegister && ncclCommDeregister &&
           ncclGetVersion(&version) == ncclSuccess && version >= NCCL_VERSION(2, 26, 0);
  }
  /// Whether the library has symmetric windows: from 2.27 on.
  bool has_windows() const {
    int version = 0;
    return registers() && ncclCommWindowRegister && ncclCommWindowDeregister &&
           ncclGetVersion(&version) == ncclSuccess && version >= NCCL_VERSION(2, 27, 0);
  }
  /// Whether copy engines can gather between windows: from 2.28 on.
  bool gathers_by_copy_engines() const {
    int version = 0;
    return has_windows() && ncclGetVersion(&version) == ncclSuccess && version >= NCCL_VERSION(2, 28, 0);
  }
};

/// The loaded libraries of this machine.
struct LoadedApi {
  NcclApi api;
  std::string problem;  ///< why they can't be used, or ""
};

/// Loads the libraries on the first call; they stay loaded.
const LoadedApi& loaded_api();

/// "2.27.3" of the number that ncclGetVersion() returns.
std::string version_text(int code);

/// Returns why `api` can't be used on this machine (its version, or no device), or "".
std::string unusable(const NcclApi& api);

/// NCCL allows several ranks on one GPU only with settings of its own.
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
