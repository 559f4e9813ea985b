// The memory of one rank that its peers can read: one arena for what callers allocate, and one for what the ranks
// exchange among themselves (flags, announcements, copies, tiles).
//
// An arena is a segment (a memfd; in a world of threads plain memory) of which a large range of addresses is mapped at
// once and pages appear as they are used. Everything in it is named to any peer by one number, the offset, and every
// communicator split from the same root knows it. Only the owner writes. Peers map the callers' arena read-only. They
// map the other one with the right to write, which they don't use: on AMD's Zen 5 the owner takes 1.8 times as long to
// write lines that a peer has read through a read-only mapping (docs/performance.md).
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

#include "tessera/comm/base_names.h"
#include "tessera/base/memory_pool.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::shm {

/// A range of mapped memory. Shared, since ranks that are threads use each other's.
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

/// A memfd of `bytes`, all of them still without pages.
UniqueFd make_segment(const char* name, std::size_t bytes);

/// Where a mapping begins, in steps of kColourStep, modulo kColours. A rank reads the same offset of several windows in
/// turn, and AMD's first-level caches predict their way by address bits 12 to 27 (M. Lipp et al., "Take A Way", 2020):
/// two streams that agree in these evict each other at every line (a reduce_scatter of 4 MiB between 2 ranks
/// takes 1.6 times as long: docs/performance.md).
inline constexpr std::size_t kColourStep = std::size_t{2} << 20;
inline constexpr std::size_t kColours = 128;

/// Maps all of `fd`, at an address of that colour where one is given. Throws SystemError.
std::shared_ptr<Mapping> map_segment(int fd, bool writable, std::optional<int> color = std::nullopt);

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  /// As many addresses as a host could use. `shared`: in a memfd, for processes; else in plain memory, for threads.
  static std::shared_ptr<Arena> make_windows(bool shared, int color);
  /// 1 GiB of addresses.
  static std::shared_ptr<Arena> make_staging(bool shared, int color);
  Arena(UniqueFd fd, std::shared_ptr<Mapping> mapping);

  /// A piece aligned to kAlignment whose pages exist. Given back when the buffer dies. Its bytes are zero only where
  /// `zeroed`. The ledger (null: none) books it. Thread-safe. Throws SystemError.
  Buffer allocate(std::size_t bytes, MemoryCategory use, const std::shared_ptr<MemoryTracker>& memory_tracker,
                  bool zeroed = false);

  const std::shared_ptr<Mapping>& mapping() const noexcept { return mapping_; }
  int descriptor() const noexcept { return fd_.get(); }
  std::size_t offset_of(const void* pointer) const noexcept {
    return static_cast<std::size_t>(static_cast<const std::byte*>(pointer) - mapping_->data());
  }
  /// After a failure peers may be anywhere: pieces are no longer given out again.
  void quarantine() noexcept;

 private:
  struct Extent {
    std::size_t bytes = 0;
    bool warm = false;  ///< has pages
  };
  using Extents = std::map<std::size_t, Extent>;  ///< free ranges by offset

  static std::shared_ptr<Arena> make(const char* name, bool shared, int color, std::size_t bytes);
  std::size_t take(std::size_t bytes);
  std::size_t cut(Extents::iterator where, std::size_t bytes);
  void give(std::size_t offset, std::size_t bytes) noexcept;
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
