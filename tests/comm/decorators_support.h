// Helpers that the tests of decorators share.
#pragma once

#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tests/comm/support.h"
#include "tests/harness/fault.h"

namespace tessera::comm_test {

using harness::Fault;
using harness::FaultKind;

inline InitOptions with_fault(const Fault& fault) {
  InitOptions config = quick_config();
  config.decorate = [fault](std::unique_ptr<Communicator> world) { return harness::inject(std::move(world), fault); };
  return config;
}

/// One all_reduce of rank + 1; returns the elements of the sum.
inline std::vector<float> summed(Communicator& comm, std::size_t count, OpOptions options = {}) {
  std::vector<float> x(count, static_cast<float>(comm.rank() + 1));
  comm.all_reduce(view_of(x.data(), count), view_of(x.data(), count), ReduceOp::sum(), options).wait();
  return x;
}

/// Collects lines of all ranks. Thread-safe.
class Lines {
 public:
  void add(std::string line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(std::move(line));
  }
  const std::vector<std::string>& get() const { return lines_; }

 private:
  std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace tessera::comm_test
