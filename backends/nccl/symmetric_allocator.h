// Symmetric windows of one communicator: memory that all its members register together, or none does.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/nccl/registered_memory.h"
#include "tessera/comm/core/control_message.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

class NcclGroup;

/// NCCL hangs, or worse, where only some ranks make a window or the sizes differ. Each rank places a window in a table
/// of its own, so the places differ, and reductions add wrong memory, if the ranks have not released the same windows.
/// So the members first compare the sizes and their windows, then whether all have the memory, then whether all have
/// made the window. Used by the group's caller, except for on_vote().
class SymmetricAllocator {
 public:
  /// Of `group`, which outlives it.
  explicit SymmetricAllocator(NcclGroup& group) : group_(group) {}

  /// Memory that is a symmetric window of the communicator if NCCL can make one on all ranks, and else as other memory.
  /// Collective. `memory_tracker`: as of RegisteredMemory::allocate(). Throws SystemError, and the group's failure.
  Buffer allocate(std::size_t bytes, MemoryCategory use, std::shared_ptr<MemoryTracker> memory_tracker);
  /// Any thread.
  void on_vote(int member, const ControlMessage& message);

 private:
  /// What the members report to each other.
  struct Vote {
    std::uint64_t bytes = 0;
    std::string problem = {};  ///< "": none
    std::string windows = {};  ///< of the first step: which windows the member has, without spaces
  };

  std::string describe_windows();
  void compare_sizes(std::span<const Vote> votes);
  void compare_windows(std::span<const Vote> votes);
  Buffer make_window(Buffer memory, Clock::time_point until);
  void exchange_problems(const Vote& mine, Clock::time_point until);
  std::vector<Vote> exchange(const Vote& mine, Clock::time_point until);
  std::optional<int> absent(std::uint64_t step) const;
  void use_no_windows(const std::string& why);

  NcclGroup& group_;
  std::uint64_t step_ = 0;  ///< numbered alike on all members
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::map<int, Vote>> votes_;  ///< by step and member, which may be ahead of this one
  std::uint64_t windows_ = 0;                           ///< made so far
  bool has_windows_ = true;  ///< until an attempt to make one has failed; the same on all members
};

}  // namespace tessera::comm::nccl
