// The vendor's reduce operations.
#pragma once

#include "backends/nccl/calls.h"

namespace tessera::comm::nccl {

ncclDataType_t vendor_type(DType dtype);

/// One for the length of a call: averages over another number than that of the ranks, and premultiplied sums, are made
/// for it. Throws NcclError.
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
