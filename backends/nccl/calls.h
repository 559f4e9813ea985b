// Translates operations to NCCL calls, and reductions in tree order to grouped messages and a kernel of this library.
#pragma once

#include <cstddef>
#include <span>

#include "backends/nccl/api.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/core/op_traits.h"

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

/// i16, which NCCL lacks, moves as f16, and bool as u8.
ncclDataType_t vendor_type(DType dtype);

/// Whether NCCL can reduce these elements: it has no i16 and no operations on bits. Those of bool are min and max.
bool has_vendor_op(ReduceOp::Kind kind, DType dtype);

/// A reduce operation for the duration of a call: averages over a number other than that of the ranks, and
/// premultiplied sums, are created for it. Throws NcclError.
class NcclReduceOp {
 public:
  NcclReduceOp(const LaunchTarget& target, const ReduceOp& op, DType dtype);
  ~NcclReduceOp();
  NcclReduceOp(const NcclReduceOp&) = delete;
  NcclReduceOp& operator=(const NcclReduceOp&) = delete;
  ncclRedOp_t get() const { return op_; }

 private:
  void create(double factor, DType dtype);
  const LaunchTarget& target_;
  ncclRedOp_t op_ = ncclSum;
  bool owned_ = false;
};

/// Calls between the constructor and end() progress together. The group is ended in any case.
class GroupCall {
 public:
  explicit GroupCall(const NcclApi& api) : api_(api) { check(api_.ncclGroupStart(), "ncclGroupStart"); }
  ~GroupCall() {
    if (!ended_) api_.ncclGroupEnd();
  }
  GroupCall(const GroupCall&) = delete;
  GroupCall& operator=(const GroupCall&) = delete;
  void end() {
    ended_ = true;
    check(api_.ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  const NcclApi& api_;
  bool ended_ = false;
};

inline const std::byte* at(const ConstView& view, std::size_t element) {
  return static_cast<const std::byte*>(view.data) + element * size_of(view.dtype);
}
inline std::byte* at(const View& view, std::size_t element) {
  return static_cast<std::byte*>(view.data) + element * size_of(view.dtype);
}

/// Without elements nothing is sent, and the peer does not receive either.
inline void send(const LaunchTarget& t, const void* data, std::size_t count, DType dtype, int peer) {
  if (count != 0) check(t.api.ncclSend(data, count, vendor_type(dtype), peer, t.comm, t.stream), "ncclSend");
}
inline void recv(const LaunchTarget& t, void* data, std::size_t count, DType dtype, int peer) {
  if (count != 0) check(t.api.ncclRecv(data, count, vendor_type(dtype), peer, t.comm, t.stream), "ncclRecv");
}

/// Whether the call uses the tree: all reductions in deterministic mode; else those that NCCL does not support, rounds
/// differently, or loses NaN in. False if this build has no kernels.
bool uses_tree(const NcclApi& api, const OpDesc& call, int ranks, bool deterministic);

/// Device memory that the call needs between its two steps.
std::size_t workspace_bytes(const OpDesc& call, int ranks, int rank);

/// Sends each rank the slices that it reduces. Returns as issue() does; once that is enqueued ...
void issue_exchange(const LaunchTarget& target, const OpDesc& call);
/// ... reduces the slices and distributes the result to the ranks that need it.
void issue_sum(const LaunchTarget& target, const OpDesc& call);

/// Whether the call is NCCL's sum and then a division here: an average of bf16 whose factor NCCL would round.
bool divides_afterwards(const NcclApi& api, const OpDesc& call);
/// Divides this rank's result of the sum.
void issue_division(const LaunchTarget& target, const OpDesc& call);

}  // namespace tessera::comm::nccl
