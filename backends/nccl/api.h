// The functions of the vendor's libraries, as a table that is filled when they are loaded: the program starts where
// they are missing, a newer library fits, and a test can put its own functions in.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <string>

#include "tessera/comm/base_names.h"
#include "backends/nccl/tree_kernels.h"

/// All that this backend calls. R: must be there; O: null where the library is too old for it.
#define TESSERA_NCCL_FUNCTIONS(R, O) \
  R(ncclGetVersion)                  \
  R(ncclGetErrorString)              \
  R(ncclGetLastError)                \
  R(ncclGetUniqueId)                 \
  R(ncclCommInitRankConfig)          \
  R(ncclCommSplit)                   \
  R(ncclCommUserRank)                \
  R(ncclCommCount)                   \
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

/// There is no function here that makes the host wait for a device.
struct NcclApi {
#define TESSERA_MEMBER(name) decltype(&::name) name = nullptr;
  TESSERA_NCCL_FUNCTIONS(TESSERA_MEMBER, TESSERA_MEMBER)
  TESSERA_CUDA_FUNCTIONS(TESSERA_MEMBER)
#undef TESSERA_MEMBER
  // These two have overloads in C++.
  cudaError_t (*cudaMalloc)(void** data, std::size_t bytes) = nullptr;
  cudaError_t (*cudaHostAlloc)(void** data, std::size_t bytes, unsigned flags) = nullptr;
  const TreeKernels* tree = nullptr;  ///< ours; null where this build has none

  bool registers() const { return ncclMemAlloc && ncclMemFree && ncclCommRegister && ncclCommDeregister; }
};

/// The libraries of this machine.
struct LoadedApi {
  NcclApi api;
  std::string problem;  ///< why they can't be used, or ""
};

/// Loads them the first time; they stay.
const LoadedApi& loaded_api();

/// Why `api` can't be used on this machine: its version, or no device. "" where it can.
std::string unusable(const NcclApi& api);

}  // namespace tessera::comm::nccl
