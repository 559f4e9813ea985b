// A barrier that names the ranks that have not come, and leaves the communicators as they are.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace tessera::c10d_backend {

/// Goes through the group's store, since an operation that is late ends its communicator. Rank 0 waits for the others
/// and tells them the result. Used by one thread at a time.
class MonitoredBarrier {
 public:
  /// `store`: of the group.
  MonitoredBarrier(c10::intrusive_ptr<::c10d::Store> store, int rank, int size)
      : store_(std::move(store)), rank_(rank), size_(size) {}
  /// Collective. Throws Timeout on every rank that has come if others have not within `timeout` of rank 0's call: it
  /// names the first of them, or all. A rank that comes later throws as well, once; after that the ranks are level.
  /// `check` is called while it waits, and may throw.
  void pass(std::chrono::milliseconds timeout, bool all_ranks, const std::function<void()>& check);

 private:
  std::string key(std::uint64_t round, int rank) const;
  bool wait_for(const std::vector<std::string>& keys, std::chrono::milliseconds timeout,
                const std::function<void()>& check) const;
  void lead(std::chrono::milliseconds timeout, bool all_ranks, const std::function<void()>& check) const;
  void follow(std::chrono::milliseconds timeout, const std::function<void()>& check) const;
  std::string describe_missing(bool all_ranks) const;
  void forget(std::uint64_t round) const;

  const c10::intrusive_ptr<::c10d::Store> store_;
  const int rank_, size_;
  std::uint64_t round_ = 0;
};

}  // namespace tessera::c10d_backend
