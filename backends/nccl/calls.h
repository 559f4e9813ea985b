// What a call becomes in the vendor's functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "backends/nccl/api.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm::nccl {

/// One of the vendor's functions failed.
struct NcclError {
  ncclResult_t result = ncclSuccess;
  const char* function = "";
};

/// Throws NcclError. In progress is well: the communicator is asked later.
inline ncclResult_t check(ncclResult_t result, const char* function) {
  if (result != ncclSuccess && result != ncclInProgress) throw NcclError{result, function};
  return result;
}

/// Throws Unsupported for what the vendor can't do; before anything is sent.
void require_supported(const OpDesc& call, int ranks);

/// Where operations are put.
struct LaunchTarget {
  const NcclApi& api;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  int rank = 0;
  int size = 1;
  void* scratch = nullptr;    ///< of the device, for a barrier
  void* workspace = nullptr;  ///< of the device, for what goes by the tree
};

/// Calls the vendor for one operation, or for the parts of a batch, which are grouped. Returns at once: ncclInProgress
/// where the stream has not got all of it yet. Throws NcclError, BackendError.
ncclResult_t issue(const LaunchTarget& target, const OpDesc& call);
ncclResult_t issue_batch(const LaunchTarget& target, std::span<const OpDesc> parts);

/// Bytes that this rank sends to `peer` in `call`. The vendor does not tell what it really moves: its collectives are
/// counted as the direct algorithms would move them, which is what a bandwidth-optimal one moves in sum.
std::uint64_t bytes_to(const OpDesc& call, int ranks, int rank, int peer);

}  // namespace tessera::comm::nccl
