// NCCL calls that become one operation.
#pragma once

#include "backends/nccl/calls.h"
#include "backends/nccl/reduce_op.h"
#include "tessera/comm/core/read_plan.h"

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

}  // namespace tessera::comm::nccl
