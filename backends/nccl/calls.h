// Translates operations to NCCL calls.
#pragma once

#include <span>

#include "backends/nccl/api.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm::nccl {

/// An NCCL call failed.
struct NcclError {
  ncclResult_t result = ncclSuccess;
  const char* function = "";
};

/// Throws NcclError. ncclInProgress is no error: NcclComm waits until the call is complete.
inline void check(ncclResult_t result, const char* function) {
  if (result != ncclSuccess && result != ncclInProgress) throw NcclError{result, function};
}

Capabilities make_capabilities(int size, bool deterministic);
/// Throws Unsupported for what NCCL does not support, before anything is sent.
void require_supported(const OpDesc& call, int ranks);

/// Where operations are enqueued.
struct LaunchTarget {
  const NcclApi& api;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  int rank = 0;
  int size = 1;
  void* scratch = nullptr;    ///< device memory for a barrier
  void* workspace = nullptr;  ///< device memory for tree reductions
};

/// Calls NCCL for one operation, or for the operations of a batch as one group. Returns at once: the stream may not
/// have received all of it yet. Throws NcclError, BackendError.
void issue(const LaunchTarget& target, const OpDesc& call);
void issue_batch(const LaunchTarget& target, std::span<const OpDesc> parts);

}  // namespace tessera::comm::nccl
