#include "backends/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/page.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // since Linux 5.14; an older kernel refuses it
#endif

namespace tessera::comm::shm {
namespace {

constexpr std::size_t kStagingArena = std::size_t{1} << 30;
constexpr std::size_t kSmallestArena = std::size_t{32} << 20;
/// Of the 2^47 that a process has, for the windows of all ranks.
constexpr std::size_t kAddresses = std::size_t{1} << 45;
constexpr std::size_t kIdleBytes =
    8 * 1024 * 1024;  // free pages kept, beyond a part of the highest live total, as in MemoryPool
constexpr std::size_t kIdlePart = 50;

std::size_t round_up(std::size_t bytes, std::size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

/// Addresses cost nothing: twice the machine's memory leaves room for fragmentation.
std::size_t wanted_capacity() {
  const std::size_t page = base::page_bytes();
  const long pages = ::sysconf(_SC_PHYS_PAGES);
  std::size_t bytes = kStagingArena;
  while (pages > 0 && bytes < 2 * static_cast<std::size_t>(pages) * page) bytes *= 2;
  return bytes;
}

/// `bytes`, or fewer: each rank maps the arenas of all. Under a limit on addresses, the windows and staging arenas of
/// all ranks get half of those that are left now.
std::size_t within_limit(std::size_t bytes, int ranks) {
  std::size_t share = kAddresses / static_cast<std::size_t>(ranks);
  rlimit limit = {};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    std::size_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    const std::size_t used = std::min<std::size_t>(pages * base::page_bytes(), limit.rlim_cur);
    share = std::min<std::size_t>(share, (limit.rlim_cur - used) / 2 / (2 * static_cast<std::size_t>(ranks)));
  }
  while (bytes > share && bytes > kSmallestArena) bytes /= 2;
  return bytes;
}

constexpr std::size_t kPeriod = kColors * kColorStep;  // of the colors

std::size_t address_of(int color) { return static_cast<std::size_t>(color) % kColors * kColorStep; }

/// From `begin` to the next address of that color.
std::size_t bytes_to_color(const std::byte* begin, int color) {
  return (address_of(color) + kPeriod - reinterpret_cast<std::uintptr_t>(begin) % kPeriod) % kPeriod;
}

/// Where this thread mapped the last segment of a color.
thread_local std::uintptr_t t_last_mapped = 0;  // NOLINT(cppcoreguidelines-avoid-non-const-global-variables)

/// Maps at the next address of `color` below the last segment, where there is room as a rule: a rank maps two segments
/// of each other rank, and so needs one call for each. Null: there is none, or the kernel (before Linux 4.17) doesn't
/// know the flag.
void* map_below_last(int fd, std::size_t bytes, int protection, int color) {
  if (t_last_mapped < bytes + 2 * kPeriod) return nullptr;
  const std::uintptr_t highest = t_last_mapped - bytes;
  const std::uintptr_t wanted = highest - (highest + kPeriod - address_of(color)) % kPeriod;
  void* const place = reinterpret_cast<void*>(wanted);  // NOLINT(performance-no-int-to-ptr)
  void* const data = ::mmap(place, bytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, fd, 0);
  if (data == MAP_FAILED) return nullptr;
  if (data != place) {
    ::munmap(data, bytes);
    return nullptr;
  }
  t_last_mapped = wanted;
  return data;
}

}  // namespace

Mapping::~Mapping() { ::munmap(data_, bytes_); }

bool Mapping::holds(const void* pointer, std::size_t bytes) const noexcept {
  const auto* at = static_cast<const std::byte*>(pointer);
  const std::less<> before;
  return !before(at, data()) && !before(data() + bytes_, at + bytes);
}

UniqueFd make_segment(const char* name, std::size_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC));
  if (!fd) throw system_error("shm: memfd_create");
  rlimit limit = {};  // beyond it, the kernel would end the process with SIGXFSZ
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes)
    throw SystemError("shm: a segment needs " + std::to_string(bytes) + " bytes, but the limit of file sizes is " +
                      std::to_string(limit.rlim_cur) + " (ulimit -f counts KiB); raise it, or use another backend");
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) throw system_error("shm: ftruncate of a segment");
  return fd;
}

std::shared_ptr<Mapping> map_segment(int fd, bool writable, std::optional<int> color) {
  struct stat status = {};
  if (::fstat(fd, &status) != 0) throw system_error("shm: fstat of a segment");
  const auto bytes = static_cast<std::size_t>(status.st_size);
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  if (color)
    if (void* const data = map_below_last(fd, bytes, protection, *color)) return std::make_shared<Mapping>(data, bytes);
  const auto refused = [&] { return system_error("shm: can't map a segment of " + std::to_string(bytes) + " bytes"); };
  // Addresses are reserved first, enough for the segment at any color; the excess is unmapped.
  const std::size_t taken = bytes + (color ? 2 * kColors * kColorStep : 0);
  void* const room = ::mmap(nullptr, taken, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED) throw refused();
  auto* const begin = static_cast<std::byte*>(room);
  const std::size_t before = color ? bytes_to_color(begin, *color) : 0;
  void* const data = ::mmap(begin + before, bytes, protection, MAP_SHARED | MAP_NORESERVE | MAP_FIXED, fd, 0);
  if (data == MAP_FAILED) {
    const SystemError error = refused();
    ::munmap(room, taken);
    throw error;
  }
  if (before > 0) ::munmap(begin, before);
  const std::size_t used = before + round_up(bytes, base::page_bytes());
  if (used < taken) ::munmap(begin + used, taken - used);
  if (color) t_last_mapped = reinterpret_cast<std::uintptr_t>(data);
  return std::make_shared<Mapping>(data, bytes);
}

std::shared_ptr<Arena> Arena::make_windows(bool shared, int color, int ranks) {
  return make("tessera-window", shared, color, within_limit(wanted_capacity(), ranks));
}

std::shared_ptr<Arena> Arena::make_staging(bool shared, int color, int ranks) {
  return make("tessera-staging", shared, color, within_limit(kStagingArena, ranks));
}

std::shared_ptr<Arena> Arena::make(const char* name, bool shared, int color, std::size_t bytes) {
  for (;; bytes /= 2) {
    try {
      if (shared) {
        UniqueFd fd = make_segment(name, bytes);
        std::shared_ptr<Mapping> mapping = map_segment(fd.get(), true, color);
        return std::make_shared<Arena>(std::move(fd), std::move(mapping));
      }
      void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) throw system_error("shm: can't map " + std::to_string(bytes) + " bytes");
      return std::make_shared<Arena>(UniqueFd{}, std::make_shared<Mapping>(data, bytes));
    } catch (const SystemError&) {  // a limit on addresses: a smaller range may succeed
      if (bytes <= kSmallestArena) throw;
    }
  }
}

Arena::Arena(UniqueFd fd, std::shared_ptr<Mapping> mapping) : fd_(std::move(fd)), mapping_(std::move(mapping)) {
  free_[0] = Extent{mapping_->bytes(), false};
  ::madvise(mapping_->data(), mapping_->bytes(), MADV_HUGEPAGE);  // a hint: refusal only costs time
}

Buffer Arena::allocate(std::size_t bytes, MemoryCategory use, const std::shared_ptr<MemoryTracker>& memory_tracker,
                       bool zeroed) {
  // Large allocations start on pages of their own, so that releasing an allocation returns its pages.
  const std::size_t page = base::page_bytes();
  const std::size_t unit = bytes >= 16 * page ? page : 128;
  const std::size_t held = round_up(bytes == 0 ? 1 : bytes, unit);
  const std::size_t offset = acquire(held);
  std::byte* data = mapping_->data() + offset;
  if (zeroed) std::memset(data, 0, bytes);
  if (memory_tracker != nullptr) memory_tracker->add(use, bytes);
  return {data, bytes, [self = shared_from_this(), use, memory_tracker, offset, held](void*, std::size_t n) {
            if (memory_tracker != nullptr) memory_tracker->remove(use, n);
            self->release(offset, held);
          }};
}

std::size_t Arena::acquire(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  // Prefers the smallest free range with pages that fits, else fresh pages at the lowest offset.
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it)
    if (it->second.warm && it->second.bytes >= bytes && (best == free_.end() || it->second.bytes < best->second.bytes))
      best = it;
  live_ += bytes;
  if (live_ > live_peak_) live_peak_ = live_;
  if (best != free_.end()) {
    idle_ -= bytes;
    return split(best, bytes);
  }
  trim();  // before the search: it joins ranges
  const auto fresh = std::ranges::find_if(
      free_, [&](const Extents::value_type& range) { return !range.second.warm && range.second.bytes >= bytes; });
  if (fresh == free_.end()) {
    live_ -= bytes;
    throw system_error("shm: no addresses left for a window of " + std::to_string(bytes) + " bytes", ENOMEM);
  }
  // Small allocations are split from larger fresh ranges, so that pages are not requested one by one.
  constexpr std::size_t kChunk = 64 * 1024;  // a page, or several
  const std::size_t unit = bytes < kChunk ? kChunk : base::page_bytes();
  const std::size_t whole = std::min(fresh->second.bytes, round_up(bytes, unit));
  const std::size_t offset = split(fresh, whole);
  try {
    populate(offset, whole);
  } catch (...) {
    live_ -= bytes;
    insert(offset, {whole, false});
    throw;
  }
  if (whole > bytes) {
    insert(offset + bytes, {whole - bytes, true});
    idle_ += whole - bytes;
  }
  return offset;
}

std::size_t Arena::split(Extents::iterator where, std::size_t bytes) {
  const std::size_t offset = where->first;
  const Extent rest{where->second.bytes - bytes, where->second.warm};
  free_.erase(where);
  if (rest.bytes > 0) free_[offset + bytes] = rest;
  return offset;
}

void Arena::insert(std::size_t offset, Extent extent) {
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + extent.bytes && next->second.warm == extent.warm) {
    extent.bytes += next->second.bytes;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes == offset && before->second.warm == extent.warm) {
      before->second.bytes += extent.bytes;
      return;
    }
  }
  free_[offset] = extent;
}

void Arena::release(std::size_t offset, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  live_ -= bytes;
  if (quarantined_) return;
  insert(offset, {bytes, true});
  idle_ += bytes;
}

void Arena::quarantine() noexcept {
  const std::lock_guard lock(mutex_);
  quarantined_ = true;
}

void Arena::populate(std::size_t offset, std::size_t bytes) {
  // Populating the pages now turns a later SIGBUS into an error. Plain memory may fault on use.
  if (!fd_) return;
  if (::madvise(mapping_->data() + offset, bytes, MADV_POPULATE_WRITE) == 0) return;
  const int refused =
      errno == EINVAL ? ::posix_fallocate(fd_.get(), static_cast<off_t>(offset), static_cast<off_t>(bytes)) : errno;
  if (refused != 0) throw system_error("shm: can't allocate a window of " + std::to_string(bytes) + " bytes", refused);
}

void Arena::trim() {
  const std::size_t page = base::page_bytes();
  if (idle_ <= live_peak_ / kIdlePart + kIdleBytes) return;
  for (auto it = free_.begin(); it != free_.end();) {
    const std::size_t first = round_up(it->first, page);
    const std::size_t last = (it->first + it->second.bytes) / page * page;
    if (!it->second.warm || last <= first) {
      ++it;
      continue;
    }
    const std::size_t offset = it->first;
    const Extent whole = it->second;
    drop_pages(first, last - first);
    it = free_.erase(it);
    if (first > offset) insert(offset, {first - offset, true});
    if (offset + whole.bytes > last) insert(last, {offset + whole.bytes - last, true});
    insert(first, {last - first, false});
    idle_ -= last - first;
    it = free_.upper_bound(last);
  }
}

void Arena::drop_pages(std::size_t offset, std::size_t bytes) noexcept {
  if (fd_) {
    ::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                static_cast<off_t>(bytes));
  } else {
    ::madvise(mapping_->data() + offset, bytes, MADV_DONTNEED);
  }
}

}  // namespace tessera::comm::shm
