// What a call becomes in the vendor's functions.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "backends/nccl/api.h"
#include "tessera/comm/communicator.h"

namespace tessera::nccl {

/// One of the vendor's functions failed.
struct VendorError {
  ncclResult_t result = ncclSuccess;
  const char* function = "";
};

/// Throws VendorError. In progress is well: the communicator is asked later.
inline ncclResult_t check(ncclResult_t result, const char* function) {
  if (result != ncclSuccess && result != ncclInProgress) throw VendorError{result, function};
  return result;
}

/// Throws Unsupported for what the vendor can't do; before anything is sent.
void require_supported(const Call& call, int ranks);

/// Where operations are put.
struct Target {
  const Api& api;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  int rank = 0;
  int size = 1;
  void* scratch = nullptr;    ///< of the device, for a barrier
  void* workspace = nullptr;  ///< of the device, for what goes by the tree
};

/// Calls the vendor for one operation, or for the parts of a batch, which are grouped. Returns at once: ncclInProgress
/// where the stream has not got all of it yet. Throws VendorError, BackendError.
ncclResult_t issue(const Target& target, const Call& call);
ncclResult_t issue_batch(const Target& target, std::span<const Call> parts);

/// Bytes that this rank sends to `peer` in `call`. The vendor does not tell what it really moves: its collectives are
/// counted as the direct algorithms would move them, which is what a bandwidth-optimal one moves in sum.
std::uint64_t bytes_to(const Call& call, int ranks, int rank, int peer);

}  // namespace tessera::nccl
