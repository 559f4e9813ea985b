// Preloaded into a test: pages are of 64 KiB, as on some systems of arm64. Mappings begin at such pages; what the test
// gives back or changes is refused unless it begins at one, and is rounded up to whole ones. Only the calls of programs
// and libraries, not those inside the C library.
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace {

constexpr std::size_t kPage = 64 * 1024;

std::size_t whole(std::size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }
bool begins_page(const void* at) { return reinterpret_cast<std::uintptr_t>(at) % kPage == 0; }

int refuse() {
  errno = EINVAL;
  return -1;
}

void* map(void* at, std::size_t bytes, int rights, int flags, int fd, off_t offset) {
  return reinterpret_cast<void*>(
      ::syscall(SYS_mmap, at, bytes, rights, flags, fd, offset));  // NOLINT(performance-no-int-to-ptr)
}

}  // namespace

extern "C" {

long sysconf(int name) noexcept {
  if (name == _SC_PAGESIZE) return kPage;
  static auto* const real = reinterpret_cast<long (*)(int)>(::dlsym(RTLD_NEXT, "sysconf"));
  const long value = real(name);
  return name == _SC_PHYS_PAGES || name == _SC_AVPHYS_PAGES ? value / 16 : value;
}

int getpagesize() noexcept { return kPage; }

void* mmap(void* at, std::size_t bytes, int rights, int flags, int fd, off_t offset) noexcept {
  if (offset % static_cast<off_t>(kPage) != 0 || ((flags & MAP_FIXED) != 0 && !begins_page(at))) {
    errno = EINVAL;
    return MAP_FAILED;
  }
  if ((flags & MAP_FIXED) != 0 || bytes == 0) return map(at, bytes, rights, flags, fd, offset);
  const std::size_t room = whole(bytes) + kPage;
  void* const begin = map(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (begin == MAP_FAILED) return begin;
  const std::size_t skew = (kPage - reinterpret_cast<std::uintptr_t>(begin) % kPage) % kPage;
  auto* const first = static_cast<char*>(begin) + skew;
  if (skew > 0) ::syscall(SYS_munmap, begin, skew);
  if (skew < kPage) ::syscall(SYS_munmap, first + whole(bytes), kPage - skew);
  // Anonymous memory fills its last page; what lies behind a file's end in its last page is not there, as it were zero.
  const std::size_t length = (flags & MAP_ANONYMOUS) != 0 ? whole(bytes) : bytes;
  void* const mapped = map(first, length, rights, flags | MAP_FIXED, fd, offset);
  if (mapped == MAP_FAILED) {
    const int reason = errno;
    ::syscall(SYS_munmap, first, whole(bytes));
    errno = reason;
  }
  return mapped;
}

void* mmap64(void* at, std::size_t bytes, int rights, int flags, int fd, off_t offset) noexcept {
  return mmap(at, bytes, rights, flags, fd, offset);
}

int munmap(void* at, std::size_t bytes) noexcept {
  if (!begins_page(at)) return refuse();
  return static_cast<int>(::syscall(SYS_munmap, at, whole(bytes)));
}

int madvise(void* at, std::size_t bytes, int advice) noexcept {
  if (!begins_page(at)) return refuse();
  return static_cast<int>(::syscall(SYS_madvise, at, whole(bytes), advice));
}

int mprotect(void* at, std::size_t bytes, int rights) noexcept {
  if (!begins_page(at)) return refuse();
  return static_cast<int>(::syscall(SYS_mprotect, at, whole(bytes), rights));
}
}
