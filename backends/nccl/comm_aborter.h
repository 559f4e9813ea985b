// Aborts an NCCL communicator that has failed.
#pragma once

#include <memory>

#include "backends/nccl/api.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

/// ncclCommAbort ends NCCL's kernels on the device; it may take long or, with a broken driver, never return. So it runs
/// in a thread of its own, which is abandoned if it does not return.
class CommAborter {
 public:
  /// Takes ownership of the communicator.
  static std::shared_ptr<CommAborter> start(const NcclApi& api, int device, ncclComm_t comm);
  /// False: the abort has not completed.
  bool wait_until(Clock::time_point until);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm::nccl
