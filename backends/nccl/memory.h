// Memory of the device, known to all communicators of a rank.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "backends/nccl/cuda.h"
#include "tessera/base/ledger.h"
#include "tessera/base/memory.h"

namespace tessera::nccl {

class Group;

/// Large blocks are registered with every communicator of the rank, so that the vendor moves them without copies of its
/// own; a communicator that is made later gets to know them, too. Thread-safe. Buffers may outlive it.
class Memory : public std::enable_shared_from_this<Memory> {
 public:
  Memory(const Api& api, int device) : api_(api), device_(device) {}

  /// Throws SystemError where the device has no more. `ledger` null: not booked.
  Buffer allocate(std::size_t bytes, MemoryUse use, std::shared_ptr<Ledger> ledger);

  void add(Group& group);
  void remove(Group& group) noexcept;

 private:
  struct Block {
    std::size_t bytes = 0;
    std::map<Group*, void*> handles;  ///< of the registrations
  };
  void enter(Group& group, void* data, Block& block);
  void release(void* data, bool registered) noexcept;

  const Api& api_;
  const int device_;
  std::mutex mutex_;
  std::vector<Group*> groups_;
  std::map<void*, Block> blocks_;  ///< the registered ones
};

}  // namespace tessera::nccl
