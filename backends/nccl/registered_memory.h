// Device memory that is registered with all communicators of a rank.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backends/nccl/cuda_objects.h"
#include "backends/nccl/operation.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/core/control_peer_monitor.h"
#include "tessera/comm/pollable.h"

namespace tessera::comm::nccl {

class NcclGroup;

/// Large blocks are registered with every communicator of the rank, also with those created later, so that NCCL
/// transfers them without copies of its own. Thread-safe. Buffers may outlive it.
class RegisteredMemory : public std::enable_shared_from_this<RegisteredMemory> {
 public:
  /// Blocks are leaked while a stream is in `abandoned`.
  RegisteredMemory(const NcclApi& api, int device, std::shared_ptr<AbandonedStreams> abandoned)
      : api_(api), device_(device), abandoned_(std::move(abandoned)) {}

  /// Throws SystemError if the device is out of memory. `memory_tracker` null: not counted.
  Buffer allocate(std::size_t bytes, MemoryCategory use, std::shared_ptr<MemoryTracker> memory_tracker);

  /// A symmetric window. `number`: the same on all ranks of the communicator.
  struct Window {
    void* handle = nullptr;
    std::uint64_t number = 0;
  };
  /// `window`: of `group` over the whole block at `data`, from allocate(); it ends with the block or the group.
  void add_window(NcclGroup& group, void* data, Window window);
  /// The numbers of the windows of `group` that exist, in ascending order.
  std::vector<std::uint64_t> windows_of(NcclGroup& group);
  /// "window 2 + 4096 bytes": where `data` is in a window of `group`; "" if it is in none.
  std::string describe_place(NcclGroup& group, const void* data);
  /// Whether a block of so many bytes is registered.
  bool registers(std::size_t bytes) const;

  void add(NcclGroup& group);
  void remove(NcclGroup& group) noexcept;

 private:
  struct Block {
    std::size_t bytes = 0;
    std::map<NcclGroup*, void*> handles;  ///< of the registrations
    std::map<NcclGroup*, Window> windows;
  };
  void enter(NcclGroup& group, void* data, Block& block);
  void release(void* data, bool registered) noexcept;

  const NcclApi& api_;
  const int device_;
  const std::shared_ptr<AbandonedStreams> abandoned_;
  std::mutex mutex_;
  std::vector<NcclGroup*> groups_;
  std::map<void*, Block> blocks_;  ///< the registered ones
};

class NcclGroup;

/// Symmetric windows of one communicator: memory that all its members register together, or none does.
///
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
