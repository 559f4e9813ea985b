// The memory of one rank that its peers can read. Each rank has two arenas: one for allocations of callers, one for the
// control data of the ranks (flags, announcements, copies, tiles).
//
// An arena is one segment: a memfd, or plain memory in a world of threads. A large address range is mapped at once, and
// pages are allocated on use. An offset identifies memory of an arena to every peer, and all communicators split from
// the same root use the same arenas. Only the owner writes. Peers map the callers' arena read-only. They map the other
// arena writable without writing to it: on AMD's Zen 5 the owner takes 1.8 times as long to write lines that a peer has
// read through a read-only mapping (docs/performance.md).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::shm {

/// A range of mapped memory. Shared, because ranks that are threads use each other's mappings.
class Mapping {
 public:
  Mapping(void* data, std::size_t bytes) : data_(data), bytes_(bytes) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::byte* data() const noexcept { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const noexcept { return bytes_; }
  bool holds(const void* pointer, std::size_t bytes) const noexcept;

 private:
  void* const data_;
  const std::size_t bytes_;
};

/// Creates a memfd of `bytes` without pages.
UniqueFd make_segment(const char* name, std::size_t bytes);

/// Start address of a mapping, in steps of kColorStep, modulo kColors. A rank reads the same offset of several
/// windows in turn, and AMD's first-level caches predict the cache way from address bits 12 to 27 (M. Lipp et al.,
/// "Take A Way", 2020): two streams with equal bits evict each other at every line (a reduce_scatter of 4 MiB between 2
/// ranks takes 1.6 times as long: docs/performance.md).
inline constexpr std::size_t kColorStep = std::size_t{2} << 20;
inline constexpr std::size_t kColors = 128;

/// Maps all of `fd`, at an address of `color` if one is given. Throws SystemError.
std::shared_ptr<Mapping> map_segment(int fd, bool writable, std::optional<int> color = std::nullopt);

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// Reserves as many addresses as a host could use; under a limit (ulimit -v), what leaves room for the arenas of all
  /// `ranks`, which each of them maps. `shared`: in a memfd, for processes; else in plain memory, for threads.
  static std::shared_ptr<Arena> make_windows(bool shared, int color, int ranks = 1);
  /// Reserves 1 GiB of addresses; less under such a limit.
  static std::shared_ptr<Arena> make_staging(bool shared, int color, int ranks = 1);
  Arena(UniqueFd fd, std::shared_ptr<Mapping> mapping);

  /// Allocates memory aligned to kAlignment, with pages. The buffer's destructor releases it. The bytes are zero
  /// only if `zeroed`. `memory_tracker` (null: none) counts it. Thread-safe. Throws SystemError.
  Buffer allocate(std::size_t bytes, MemoryCategory use, const std::shared_ptr<MemoryTracker>& memory_tracker,
                  bool zeroed = false);

  const std::shared_ptr<Mapping>& mapping() const noexcept { return mapping_; }
  int descriptor() const noexcept { return fd_.get(); }
  std::size_t offset_of(const void* pointer) const noexcept {
    return static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - mapping_->data());
  }
  /// Stops the reuse of allocations: after a failure, peers may still access any of them.
  void quarantine() noexcept;

 private:
  struct Extent {
    std::size_t bytes = 0;
    bool warm = false;  ///< has pages
  };
  using Extents = std::map<std::size_t, Extent>;  ///< free ranges by offset

  static std::shared_ptr<Arena> make(const char* name, bool shared, int color, std::size_t bytes);
  std::size_t acquire(std::size_t bytes);
  std::size_t split(Extents::iterator where, std::size_t bytes);
  void release(std::size_t offset, std::size_t bytes) noexcept;
  void insert(std::size_t offset, Extent extent);
  void populate(std::size_t offset, std::size_t bytes);
  void trim();
  void drop_pages(std::size_t offset, std::size_t bytes) noexcept;

  const UniqueFd fd_;
  const std::shared_ptr<Mapping> mapping_;
  std::mutex mutex_;
  Extents free_;
  std::size_t live_ = 0;
  std::size_t live_peak_ = 0;
  std::size_t idle_ = 0;  ///< bytes of free ranges that have pages
  bool quarantined_ = false;
};

}  // namespace tessera::comm::shm
