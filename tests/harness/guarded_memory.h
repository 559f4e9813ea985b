// The memory of a guarded device, and what of the host's memory its copies may use without waiting.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

#include "tessera/base/error.h"

namespace tessera::harness {

/// One range of addresses that is opened and closed as a whole.
class Arena {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;
  Arena() {
    void* data = ::mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data == MAP_FAILED) throw base::system_error("mmap");
    base_ = static_cast<std::byte*>(data);
  }
  ~Arena() { ::munmap(base_, kBytes); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  void* take(std::size_t bytes) {
    const std::size_t size = rounded(bytes);
    const auto found = idle_.find(size);
    if (found != idle_.end()) {
      void* data = found->second;
      idle_.erase(found);
      return data;
    }
    if (used_ + size > kBytes) throw base::SystemError("the guarded device has no more memory");
    used_ += size;
    return base_ + used_ - size;
  }
  void give(void* data, std::size_t bytes) { idle_.emplace(rounded(bytes), data); }

  void open() {
    if (depth_++ == 0) protect(PROT_READ | PROT_WRITE);
  }
  void close() {
    if (--depth_ == 0) protect(PROT_NONE);
  }

 private:
  static constexpr std::size_t kPage = 4096;
  static std::size_t rounded(std::size_t bytes) {
    return (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage;
  }
  void protect(int rights) const {
    if (used_ > 0 && ::mprotect(base_, used_, rights) != 0) throw base::system_error("mprotect");
  }
  std::byte* base_ = nullptr;
  std::size_t used_ = 0;
  int depth_ = 0;
  std::multimap<std::size_t, void*> idle_;
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

/// Ranges of the host's memory.
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
  std::map<std::uintptr_t, std::uintptr_t> ends_;  // by begin
};

/// What all streams of a device share. Its lock is held while anything of the device works.
struct GuardedShared {
  std::recursive_mutex mutex;
  Arena arena;
  PinnedRanges pinned;
};

}  // namespace tessera::harness
