// Buffers, and the pool they come from.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "tessera/base/export.h"
#include "tessera/base/memory_tracker.h"

namespace tessera::base {

/// Every buffer starts at a multiple of this many bytes.
inline constexpr std::size_t kAlignment = 64;

/// Owned bytes, given back to where they came from when the object dies. Move-only.
class TESSERA_API Buffer {
 public:
  using Release = std::function<void(void* data, std::size_t bytes)>;  ///< must not throw
  Buffer() = default;
  Buffer(void* data, std::size_t bytes, Release release) : data_(data), bytes_(bytes), release_(std::move(release)) {}
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { reset(); }
  void reset() noexcept;

  void* data() const noexcept { return data_; }
  std::byte* bytes_at(std::size_t offset) const noexcept { return static_cast<std::byte*>(data_) + offset; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Release release_;
};

class DeviceRuntime;

struct MemoryPoolOptions {
  std::size_t pooled_from = 256 * 1024;       ///< smaller requests go to the C library
  double slack = 0.02;                        ///< idle memory kept, as a part of the highest live total ...
  std::size_t slack_bytes = 8 * 1024 * 1024;  ///< ... plus this
  bool poison = false;                        ///< fill released blocks with 0xFF (NaN), to make a stale read visible
};

/// Memory of one rank on one device. A released block keeps its pages and serves the next request that it fits, so that
/// a training step maps and faults nothing once the first has run. Thread-safe. Buffers may outlive the pool object;
/// the ledger, which is given, must outlive the buffers. Memory of a device is handed on in the order in which the host
/// releases and asks, so all work that uses it belongs on one stream (or is ordered by events before the release).
class TESSERA_API MemoryPool {
 public:
  /// `runtime` null: the host's memory. Only the host's memory is poisoned.
  explicit MemoryPool(std::shared_ptr<MemoryTracker> memory_tracker, MemoryPoolOptions options = {},
                      std::shared_ptr<DeviceRuntime> runtime = nullptr);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// Uninitialised bytes, aligned to kAlignment, booked in the ledger under `use`. Zero bytes give a valid buffer of
  /// size 0. Throws SystemError where the system has no more.
  Buffer allocate(std::size_t bytes, MemoryCategory use);

  /// Gives all idle blocks back to the system.
  void trim();

  /// An empty pool of the same memory and ledger that gives nothing back while it lives: for memory whose addresses
  /// somebody remembers.
  std::unique_ptr<MemoryPool> make_keeping() const;
  /// Each serves the other's requests from here on; buffers go back where they came from. Not thread-safe.
  void swap(MemoryPool& other) noexcept { impl_.swap(other.impl_); }

  MemoryTracker& memory_tracker() const noexcept;
  std::shared_ptr<MemoryTracker> shared_memory_tracker() const noexcept;

 private:
  class Impl;
  explicit MemoryPool(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::base
