// Helpers that the decorator tests share.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "plugins/decorators/spec.h"
#include "tests/comm/support.h"

namespace tessera::decorators_test {

using namespace tessera::comm_test;

inline InitOptions decorated(const std::string& spec) {
  InitOptions config = quick_config();
  config.decorate = [spec](std::unique_ptr<Communicator> world) {
    return decorators::decorate(std::move(world), spec);
  };
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

}  // namespace tessera::decorators_test
