// NCCL's reduce operations.
#pragma once

#include "backends/nccl/calls.h"

namespace tessera::comm::nccl {

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

}  // namespace tessera::comm::nccl
