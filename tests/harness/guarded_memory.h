// The memory of a guarded device, and the host memory that its copies may use without waiting.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tests/harness/guarded_device.h"

namespace tessera::harness {

/// One address range that is opened and closed as a whole, together with imported memory. It is a memfd, so other
/// processes can map it. Guarded by the device's lock.
class Arena {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;
  Arena();
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* allocate(std::size_t bytes);
  void deallocate(void* data, std::size_t bytes);

  base::IpcMemoryHandle share(void* data, std::size_t bytes);
  void* import(const base::IpcMemoryHandle& handle);
  void release(void* imported);
  const GuardedSharing& sharing() const { return sharing_; }

  void open() {
    if (depth_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--depth_ == 0) protect(PROT_NONE);
  }

 private:
  struct Imported {
    std::size_t bytes = 0;               ///< 0: this arena's own memory
    std::uint32_t* importers = nullptr;  ///< in the owner's first page
    void* page = nullptr;
  };
  void protect(int rights) const;
  std::byte* base_ = nullptr;
  std::uint32_t* importers_ = nullptr;  ///< the first page: the number of importers of each shared block
  int fd_ = -1;
  std::size_t used_ = 0;
  int depth_ = 0;
  std::multimap<std::size_t, void*> idle_;
  std::set<void*> allocated_;
  std::map<void*, std::uint32_t> shared_;  ///< their indices in importers_
  std::uint32_t next_ = 0;
  std::multimap<void*, Imported> imported_;
  GuardedSharing sharing_;
};

class OpenArena {
 public:
  explicit OpenArena(Arena& arena) : arena_(arena) { arena_.open(); }
  ~OpenArena() { arena_.close(); }
  OpenArena(const OpenArena&) = delete;
  OpenArena& operator=(const OpenArena&) = delete;

 private:
  Arena& arena_;
};

/// Pinned address ranges of the host.
class PinnedRanges {
 public:
  void add(const void* data, std::size_t bytes) { ends_[address(data)] = address(data) + bytes; }
  void remove(const void* data) { ends_.erase(address(data)); }
  bool holds(const void* data, std::size_t bytes) const {
    const auto after = ends_.upper_bound(address(data));
    return after != ends_.begin() && address(data) + bytes <= std::prev(after)->second;
  }

 private:
  static std::uintptr_t address(const void* data) { return reinterpret_cast<std::uintptr_t>(data); }
  std::map<std::uintptr_t, std::uintptr_t> ends_;  // keyed by begin
};

/// State shared by all streams of a device. Its lock is held while the device does any work.
struct GuardedShared {
  std::recursive_mutex mutex;
  Arena arena;
  PinnedRanges pinned;
};

}  // namespace tessera::harness
