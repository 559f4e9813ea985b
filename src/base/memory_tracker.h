// The memory tracker: live bytes, as requested, by category, now and at the peak.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::base {

/// The purpose of memory. Reports and JSON use these names.
enum class MemoryCategory : std::uint8_t {
  parameter,            ///< parameters at rest
  gradient,             ///< kept gradients
  optimizer,            ///< optimizer state and master weights
  activation,           ///< activations, and other tensors of a forward or backward
  unsharded_parameter,  ///< leases of gathered parameters
  unsharded_gradient,   ///< leases of full gradients
  communication,        ///< buffers of collectives
  other,                ///< module buffers, tables, scratch memory
  offloaded,            ///< shards in host memory that belong on a device: a different memory, excluded from totals
};
/// Number of memory categories.
inline constexpr std::size_t kMemoryUses = 9;
/// The category's name in reports and JSON: "parameter".
TESSERA_API std::string_view name_of(MemoryCategory use);

/// A change of the live bytes of one category.
struct MemoryChange {
  std::int64_t at_ns = 0;                      ///< time on the clock of keep_history()
  MemoryCategory use = MemoryCategory::other;  ///< use of the bytes
  std::int64_t bytes = 0;                      ///< negative: no longer live
};

/// Live bytes over time.
struct MemoryHistory {
  std::array<std::int64_t, kMemoryUses> before{};  ///< live bytes of each category before the first change
  std::vector<MemoryChange> changes;               ///< changes in the order in which they were made
};

/// Tracks one rank's memory. Thread-safe. All values are bytes.
class TESSERA_API MemoryTracker {
 public:
  /// The tracker's values at one time. Arrays are indexed by MemoryCategory.
  struct Snapshot {
    std::array<std::uint64_t, kMemoryUses> now{};      ///< live bytes of each category
    std::array<std::uint64_t, kMemoryUses> peak{};     ///< peak of each category by itself
    std::array<std::uint64_t, kMemoryUses> at_peak{};  ///< live bytes of each category at the instant of total_peak
    std::uint64_t total_now = 0;                       ///< live bytes of all categories but `offloaded`
    std::uint64_t total_peak = 0;                      ///< highest sum at one instant
    std::uint64_t reserved = 0;                        ///< highest held minus total_peak: the pools' worst overhead
    /// Highest live bytes of the category.
    std::uint64_t peak_of(MemoryCategory use) const { return peak[static_cast<std::size_t>(use)]; }
    /// Live bytes of the category.
    std::uint64_t now_of(MemoryCategory use) const { return now[static_cast<std::size_t>(use)]; }
  };

  void add(MemoryCategory use, std::size_t bytes) noexcept;  ///< counts bytes that become live
  /// Counts bytes that are no longer live; must match an earlier add().
  void remove(MemoryCategory use, std::size_t bytes) noexcept;

  /// Reports a change of the bytes that a pool holds beyond its live ones (idle blocks, rounding).
  void hold(std::int64_t change) noexcept;

  /// Keeps every change from now on, 24 bytes each, until drain_history(); or ends that and drops what it kept. `clock`
  /// gives the time of a change, and may be called by several threads; empty: host time.
  void keep_history(bool keep, std::function<std::int64_t()> clock = {});
  MemoryHistory drain_history();  ///< the changes since the last call, or since keep_history()

  Snapshot snapshot() const noexcept;  ///< a copy of the values; not atomic if other threads change them meanwhile
  /// Resets the peaks to the bytes live now.
  void reset_peaks() noexcept;

 private:
  using Counter = std::atomic<std::int64_t>;
  static bool raise(Counter& peak, std::int64_t value) noexcept;  ///< true if `value` is a new peak
  std::array<Counter, kMemoryUses> now_{};
  std::array<Counter, kMemoryUses> peak_{};
  std::array<Counter, kMemoryUses> at_peak_{};
  Counter total_{0};
  Counter total_peak_{0};
  Counter slack_{0};
  Counter held_peak_{0};
  void note(MemoryCategory use, std::int64_t change) noexcept;
  std::atomic<bool> keeps_history_{false};
  std::mutex history_mutex_;
  MemoryHistory history_;
  std::function<std::int64_t()> history_clock_;
};

/// Bytes that a memory tracker counts while this object lives. The tracker must outlive it. Move-only: leaves the
/// source without bytes.
class TESSERA_API TrackedBytes {
 public:
  TrackedBytes() = default;
  /// Adds the bytes to the tracker.
  TrackedBytes(MemoryTracker& memory_tracker, MemoryCategory use, std::size_t bytes)
      : memory_tracker_(&memory_tracker, {use, bytes}) {
    memory_tracker.add(use, bytes);
  }
  void reset() noexcept { memory_tracker_.reset(); }  ///< removes the bytes from the tracker, once

 private:
  struct Remove {
    MemoryCategory use;
    std::size_t bytes;
    void operator()(MemoryTracker* from) const noexcept { from->remove(use, bytes); }
  };
  std::unique_ptr<MemoryTracker, Remove> memory_tracker_;
};

}  // namespace tessera::base
