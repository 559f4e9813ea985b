// NCCL calls that become one operation.
#pragma once

#include "backends/nccl/calls.h"

namespace tessera::comm::nccl {

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

}  // namespace tessera::comm::nccl
