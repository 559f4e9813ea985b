#include "tessera/base/memory_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "tessera/base/device/slab_allocator.h"
#include "tessera/base/device_runtime.h"
#include "tessera/base/error.h"
#include "tessera/base/page.h"

namespace tessera::base {

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      release_(std::move(other.release_)) {
  other.release_ = nullptr;
}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this != &other) {
    reset();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    release_ = std::move(other.release_);
    other.release_ = nullptr;
  }
  return *this;
}

void Buffer::reset() noexcept {
  void* data = std::exchange(data_, nullptr);
  if (data != nullptr && release_) release_(data, bytes_);
  bytes_ = 0;
  release_ = nullptr;
}

namespace {

constexpr std::size_t kHugePage = 2 * 1024 * 1024;

std::size_t round_up(std::size_t bytes, std::size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

/// Allocating device memory synchronizes the device; keeping a quarter more costs less.
MemoryPoolOptions adapted(MemoryPoolOptions options, const DeviceRuntime* runtime) {
  if (runtime == nullptr) return options;
  options.poison = false;
  if (!runtime->traits().slow_allocation) return options;
  options.pooled_from = std::max(options.pooled_from, std::size_t{256} << 10);
  options.slack = std::max(options.slack, 0.25);
  options.slack_bytes = std::max(options.slack_bytes, std::size_t{256} << 20);
  return options;
}

/// Host memory needs no runtime: the C library and the kernel provide it.
std::shared_ptr<DeviceRuntime> unless_host(std::shared_ptr<DeviceRuntime> runtime) {
  return runtime != nullptr && runtime->device().type == DeviceType::cpu ? nullptr : std::move(runtime);
}

[[noreturn]] void out_of_memory(std::size_t bytes) {
  throw system_error("memory: can't allocate " + std::to_string(bytes) + " bytes", ENOMEM);
}

}  // namespace

/// Idle blocks by size, the oldest first among equals. A request uses the smallest that fits and wastes at most an
/// eighth.
class MemoryPool::Impl : public std::enable_shared_from_this<Impl> {
 public:
  Impl(std::shared_ptr<MemoryTracker> memory_tracker, MemoryPoolOptions options, std::shared_ptr<DeviceRuntime> runtime)
      : memory_tracker_(std::move(memory_tracker)),
        runtime_(std::move(runtime)),
        options_(adapted(options, runtime_.get())) {
    if (runtime_ != nullptr && runtime_->traits().slow_allocation)
      small_.emplace(*runtime_, *memory_tracker_, options_.pooled_from);
  }
  ~Impl() {
    try {
      drop_idle();
    } catch (const Error&) {  // the device has failed, so nothing runs there any more
      while (!idle_.empty()) drop_oldest();
    }
  }

  Buffer small(std::size_t bytes, MemoryCategory use) {
    if (runtime_ != nullptr) return small_of_device(bytes, use);
    void* data = std::aligned_alloc(kAlignment, round_up(bytes == 0 ? 1 : bytes, kAlignment));
    if (data == nullptr) out_of_memory(bytes);
    memory_tracker_->add(use, bytes);
    return {data, bytes, [self = shared_from_this(), use](void* p, std::size_t n) {
              if (self->options_.poison) std::memset(p, 0xFF, n);
              self->memory_tracker_->remove(use, n);
              std::free(p);
            }};
  }

  Buffer small_of_device(std::size_t bytes, MemoryCategory use) {
    void* data = nullptr;
    try {
      data = acquire_small(bytes);
    } catch (const SystemError& exhausted) {
      trim();
      data = or_explain(exhausted, [&] { return acquire_small(bytes); });
    }
    memory_tracker_->add(use, bytes);
    return {data, bytes, [self = shared_from_this(), use](void* p, std::size_t n) {
              self->memory_tracker_->remove(use, n);
              if (self->small_) {
                self->small_->release(p, n);
              } else {
                self->runtime_->free(p, n);
              }
            }};
  }

  Buffer pooled(std::size_t bytes, MemoryCategory use) {
    const std::size_t needed = round_up(bytes, page_bytes());
    const Block block = acquire(needed);
    memory_tracker_->add(use, bytes);
    return {block.data, bytes, [self = shared_from_this(), use, needed, held = block.bytes](void* p, std::size_t n) {
              if (self->options_.poison) std::memset(p, 0xFF, n);
              self->memory_tracker_->remove(use, n);
              self->release(Block{p, held}, needed);
            }};
  }

  void trim() {
    wait_for_host_events();
    const std::lock_guard lock(mutex_);
    drop_idle();
  }

  /// Before calls that may synchronize the device.
  void wait_for_host_events() const {
    if (runtime_ != nullptr) runtime_->wait_for_host_events();
  }

  MemoryTracker& memory_tracker() const { return *memory_tracker_; }
  std::shared_ptr<MemoryTracker> shared_memory_tracker() const { return memory_tracker_; }
  const MemoryPoolOptions& options() const { return options_; }

  std::shared_ptr<Impl> make_keeping() const {
    MemoryPoolOptions options = options_;
    options.slack_bytes = std::size_t{1} << 62;  // more than any device has, so idle memory is never trimmed
    return std::make_shared<Impl>(memory_tracker_, options, runtime_);
  }

 private:
  struct Block {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  using Idle = std::multimap<std::size_t, std::list<Block>::iterator>;

  void* acquire_small(std::size_t bytes) { return small_ ? small_->acquire(bytes) : runtime_->allocate(bytes); }

  /// Returns retry(). If memory is still exhausted after the idle blocks were returned, says what holds it.
  template <class Retry>
  void* or_explain(const SystemError& first, const Retry& retry) const {
    try {
      return retry();
    } catch (const SystemError&) {
      throw SystemError(std::string(first.what()) + "; " + describe_held());
    }
  }

  /// "this rank holds 3.2 MB: parameter 2.1 MB, gradient 1.1 MB".
  std::string describe_held() const {
    const MemoryTracker::Snapshot held = memory_tracker_->snapshot();
    const auto megabytes = [](std::uint64_t bytes) {
      std::array<char, 32> text{};
      std::snprintf(text.data(), text.size(), "%.1f MB", static_cast<double>(bytes) / 1e6);
      return std::string(text.data());
    };
    std::uint64_t total = 0;
    std::string parts;
    for (std::size_t use = 0; use < kMemoryUses; ++use) {
      if (held.now[use] == 0) continue;
      total += held.now[use];
      parts += (parts.empty() ? ": " : ", ") + std::string(name_of(static_cast<MemoryCategory>(use))) + " " +
               megabytes(held.now[use]);
    }
    return "this rank holds " + megabytes(total) + parts;
  }

  /// `bytes` and `needed` are whole pages; the block may be larger.
  Block acquire(std::size_t bytes) {
    std::unique_lock lock(mutex_);
    const auto found = by_size_.lower_bound(bytes);
    if (found != by_size_.end() && found->first <= bytes + bytes / 8) {
      const Block block = *found->second;
      idle_.erase(found->second);
      by_size_.erase(found);
      idle_bytes_ -= block.bytes;
      spare_bytes_ += block.bytes - bytes;
      account(static_cast<std::int64_t>(block.bytes));
      return block;
    }
    lock.unlock();  // other threads may have to release buffers before a stream goes on
    wait_for_host_events();
    lock.lock();
    // Nothing fits: idle blocks are returned before more is mapped, so that the bytes held stay near what was ever
    // needed.
    drop_idle([&] { return live_ + idle_bytes_ + bytes > allowance(live_ + bytes); });
    const Block block{map_or_trim(bytes), bytes};
    account(static_cast<std::int64_t>(bytes));
    return block;
  }

  void release(Block block, std::size_t needed) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(block);
    by_size_.emplace(block.bytes, std::prev(idle_.end()));
    idle_bytes_ += block.bytes;
    spare_bytes_ -= block.bytes - needed;
    account(-static_cast<std::int64_t>(block.bytes));
  }

  /// Moves bytes between idle and live. The tracker's slack is what is held beyond the requests: idle blocks, and the
  /// unused ends of live ones (the rounding to pages is not counted).
  void account(std::int64_t live_change) {
    live_ = static_cast<std::size_t>(static_cast<std::int64_t>(live_) + live_change);
    if (live_ > live_peak_) live_peak_ = live_;
    const auto slack = static_cast<std::int64_t>(idle_bytes_ + spare_bytes_);
    memory_tracker_->hold(slack - reported_);
    reported_ = slack;
  }

  std::size_t allowance(std::size_t live) const {
    const std::size_t peak = live > live_peak_ ? live : live_peak_;
    return peak + static_cast<std::size_t>(options_.slack * static_cast<double>(peak)) + options_.slack_bytes;
  }

  /// Returns idle blocks, the oldest first, while `more`. Queued work may still use them, and a device's free only may
  /// wait for it, so this waits.
  void drop_idle(const std::function<bool()>& more = [] { return true; }) {
    if (idle_.empty() || !more()) return;
    if (runtime_ != nullptr) runtime_->synchronize();
    do drop_oldest();
    while (!idle_.empty() && more());
  }

  void drop_oldest() {
    const Block block = idle_.front();
    const auto [first, last] = by_size_.equal_range(block.bytes);
    for (auto it = first; it != last; ++it) {
      if (it->second != idle_.begin()) continue;
      by_size_.erase(it);
      break;
    }
    idle_.pop_front();
    idle_bytes_ -= block.bytes;
    account(0);
    if (runtime_ != nullptr) {
      runtime_->free(block.data, block.bytes);
    } else {
      ::munmap(block.data, block.bytes);
    }
  }

  void* map_or_trim(std::size_t bytes) {
    try {
      return map(bytes);
    } catch (const SystemError& exhausted) {
      drop_idle();
      return or_explain(exhausted, [&] { return map(bytes); });
    }
  }

  /// From 2 MiB on, a block begins at a huge-page boundary: the kernel walks one entry instead of 512 when it faults,
  /// reads for a peer, or pins for a device.
  void* map(std::size_t bytes) const {
    if (runtime_ != nullptr) return runtime_->allocate(bytes);
    const std::size_t spare = bytes >= kHugePage ? kHugePage - page_bytes() : 0;
    void* const mapped = ::mmap(nullptr, bytes + spare, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) out_of_memory(bytes);
    if (spare == 0) return mapped;
    auto* const begin = static_cast<std::byte*>(mapped);
    const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
    if (before != 0) ::munmap(begin, before);
    if (before != spare) ::munmap(begin + before + bytes, spare - before);
    ::madvise(begin + before, bytes, MADV_HUGEPAGE);  // a hint: refusal costs only time
    return begin + before;
  }

  const std::shared_ptr<MemoryTracker> memory_tracker_;
  const std::shared_ptr<DeviceRuntime> runtime_;  // null: the host
  const MemoryPoolOptions options_;
  std::optional<SlabAllocator> small_;
  std::mutex mutex_;
  std::list<Block> idle_;  // oldest first
  Idle by_size_;
  std::size_t idle_bytes_ = 0;
  std::size_t spare_bytes_ = 0;
  std::size_t live_ = 0;
  std::size_t live_peak_ = 0;
  std::int64_t reported_ = 0;
};

MemoryPool::MemoryPool(std::shared_ptr<MemoryTracker> memory_tracker, MemoryPoolOptions options,
                       std::shared_ptr<DeviceRuntime> runtime)
    : impl_(std::make_shared<Impl>(std::move(memory_tracker), options, unless_host(std::move(runtime)))) {}
MemoryPool::MemoryPool(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
MemoryPool::~MemoryPool() { impl_->wait_for_host_events(); }  // idle blocks are freed

std::unique_ptr<MemoryPool> MemoryPool::make_keeping() const {
  return std::unique_ptr<MemoryPool>(new MemoryPool(impl_->make_keeping()));
}

Buffer MemoryPool::allocate(std::size_t bytes, MemoryCategory use) {
  if (bytes > PTRDIFF_MAX) out_of_memory(bytes);  // before it is rounded up
  return bytes < impl_->options().pooled_from ? impl_->small(bytes, use) : impl_->pooled(bytes, use);
}

void MemoryPool::trim() { impl_->trim(); }
MemoryTracker& MemoryPool::memory_tracker() const noexcept { return impl_->memory_tracker(); }
std::shared_ptr<MemoryTracker> MemoryPool::shared_memory_tracker() const noexcept {
  return impl_->shared_memory_tracker();
}

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace tessera::base
