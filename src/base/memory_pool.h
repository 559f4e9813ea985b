// Buffers and their pool.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "tessera/base/export.h"
#include "tessera/base/memory_tracker.h"

namespace tessera::base {

/// Every buffer starts at a multiple of this many bytes.
inline constexpr std::size_t kAlignment = 64;

/// Owned bytes, returned to their source by the destructor. Move-only.
class TESSERA_API Buffer {
 public:
  using Release = std::function<void(void* data, std::size_t bytes)>;  ///< must not throw
  Buffer() = default;
  /// Becomes the owner of `data`; the destructor calls `release`, which may be null.
  Buffer(void* data, std::size_t bytes, Release release) : data_(data), bytes_(bytes), release_(std::move(release)) {}
  Buffer(Buffer&& other) noexcept;             ///< leaves `other` empty
  Buffer& operator=(Buffer&& other) noexcept;  ///< releases the current bytes and leaves `other` empty
  ~Buffer() { reset(); }
  void reset() noexcept;  ///< releases the bytes, if any; the buffer is then empty

  void* data() const noexcept { return data_; }  ///< owned by this buffer; null if empty
  /// The address `offset` bytes after data().
  std::byte* bytes_at(std::size_t offset) const noexcept { return static_cast<std::byte*>(data_) + offset; }
  std::size_t bytes() const noexcept { return bytes_; }                 ///< bytes requested, without a pool's rounding
  explicit operator bool() const noexcept { return data_ != nullptr; }  ///< true unless empty

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Release release_;
};

class DeviceRuntime;

/// Settings of a MemoryPool.
struct MemoryPoolOptions {
  /// Smaller requests use the C library, which returns their pages to the system when many are released; those of
  /// devices whose allocation is slow share blocks, and are at least 256 KiB.
  std::size_t pooled_from = 16 * 1024;
  double slack = 0.02;                        ///< idle memory to keep, as a fraction of the highest live total ...
  std::size_t slack_bytes = 8 * 1024 * 1024;  ///< ... plus this
  bool poison = false;                        ///< fill released blocks with 0xFF (NaN), to make a stale read visible
};

/// A pool of one rank's memory on one device. A released block keeps its pages and serves the next request that it
/// fits, so a training step maps and faults nothing after the first one. Thread-safe. Buffers may outlive the pool
/// object; the memory tracker must outlive the buffers. Device memory is reused in the order in which the host releases
/// and requests it, so all work that uses it belongs on one stream (or must be ordered by events before the release).
class TESSERA_API MemoryPool {
 public:
  /// A null `runtime` means host memory. Only host memory is poisoned.
  explicit MemoryPool(std::shared_ptr<MemoryTracker> memory_tracker, MemoryPoolOptions options = {},
                      std::shared_ptr<DeviceRuntime> runtime = nullptr);
  ~MemoryPool();
  MemoryPool(const MemoryPool&) = delete;
  MemoryPool& operator=(const MemoryPool&) = delete;

  /// Allocates uninitialized bytes, aligned to kAlignment, tracked under `use`. Zero bytes return a valid buffer of
  /// size 0. Throws SystemError if the system is out of memory.
  Buffer allocate(std::size_t bytes, MemoryCategory use);

  /// Returns all idle blocks to the system.
  void trim();

  /// Creates an empty pool of the same memory and tracker that returns nothing to the system while it lives: for memory
  /// whose addresses are recorded elsewhere.
  std::unique_ptr<MemoryPool> make_keeping() const;
  /// Exchanges the two pools for later requests; existing buffers return to their own pool. Not thread-safe.
  void swap(MemoryPool& other) noexcept { impl_.swap(other.impl_); }

  MemoryTracker& memory_tracker() const noexcept;                         ///< counts this pool's buffers
  std::shared_ptr<MemoryTracker> shared_memory_tracker() const noexcept;  ///< shares ownership of memory_tracker()

 private:
  class Impl;
  explicit MemoryPool(std::shared_ptr<Impl> impl);
  std::shared_ptr<Impl> impl_;
};

}  // namespace tessera::base
