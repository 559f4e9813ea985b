// Ends a vendor's communicator that has failed.
#pragma once

#include <memory>

#include "backends/nccl/api.h"

namespace tessera::comm::nccl {

/// The vendor's abort makes its kernels on the device end, and may itself take long or, with a broken driver, for ever.
/// So it runs in a thread of its own, which is left behind where it does not come back.
class CommAborter {
 public:
  /// Takes the communicator over.
  static std::shared_ptr<CommAborter> start(const NcclApi& api, int device, ncclComm_t comm);
  /// False: still not.
  bool wait_until(Clock::time_point until);

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera::comm::nccl
