// Calls of the vendor that become one operation.
#pragma once

#include "backends/nccl/operations.h"

namespace tessera::nccl {

/// What is called between here and end() makes progress together. Ended in any case.
class Grouped {
 public:
  explicit Grouped(const Api& api) : api_(api) { check(api_.ncclGroupStart(), "ncclGroupStart"); }
  ~Grouped() {
    if (!ended_) api_.ncclGroupEnd();
  }
  Grouped(const Grouped&) = delete;
  Grouped& operator=(const Grouped&) = delete;
  ncclResult_t end() {
    ended_ = true;
    return check(api_.ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  const Api& api_;
  bool ended_ = false;
};

}  // namespace tessera::nccl
