// The first failure of a communicator on one rank.
#pragma once

#include <atomic>
#include <utility>

#include "tessera/comm/failure.h"

namespace tessera::comm {

/// Any thread reads it; those that set it are ordered by a lock of the group.
class FailureState {
 public:
  bool failed() const noexcept { return failed_.load(); }
  /// Keeps the first failure and ignores later ones. True: it is the first.
  bool set(Failure failure) noexcept {
    if (failed_.load()) return false;
    failure_ = std::move(failure);
    failed_.store(true);
    return true;
  }
  /// Does not change any more once failed() is true.
  const Failure& get() const noexcept { return failure_; }
  [[noreturn]] void rethrow() const { throw_failure(failure_); }

 private:
  std::atomic<bool> failed_{false};
  Failure failure_;
};

}  // namespace tessera::comm
