// Device memory that is registered with all communicators of a rank.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backends/nccl/abandoned_streams.h"
#include "backends/nccl/cuda_objects.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"

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

}  // namespace tessera::comm::nccl
