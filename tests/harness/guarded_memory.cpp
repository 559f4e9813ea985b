#include "tests/harness/guarded_memory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "tessera/base/page.h"
#include "tessera/base/process.h"

namespace tessera::harness {
namespace {

const std::size_t kPage = base::page_bytes();
constexpr std::size_t kMaxShared = 4096 / sizeof(std::uint32_t);

std::size_t rounded(std::size_t bytes) { return (std::max<std::size_t>(bytes, 1) + kPage - 1) / kPage * kPage; }

std::uint32_t* map_first_page(int fd) {
  void* const page = ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) throw base::system_error("mmap of a guarded device's first page");
  return static_cast<std::uint32_t*>(page);
}

/// Contents of a handle.
struct Content {
  base::ProcessIdentity process{};
  int fd = -1;
  std::uint32_t place = 0;
  std::size_t offset = 0;
  std::size_t bytes = 0;
};
static_assert(sizeof(Content) <= sizeof(base::IpcMemoryHandle));

}  // namespace

Arena::Arena() : fd_(::memfd_create("tessera-guarded", MFD_CLOEXEC)) {
  if (fd_ < 0 || ::ftruncate(fd_, static_cast<off_t>(kPage + kBytes)) != 0) throw base::system_error("memfd_create");
  void* data = ::mmap(nullptr, kBytes, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd_, kPage);
  if (data == MAP_FAILED) throw base::system_error("mmap");
  base_ = static_cast<std::byte*>(data);
  importers_ = map_first_page(fd_);
}

Arena::~Arena() {
  while (!imported_.empty()) release(imported_.begin()->first);
  ::munmap(importers_, kPage);
  ::munmap(base_, kBytes);
  ::close(fd_);
}

void* Arena::allocate(std::size_t bytes) {
  const std::size_t size = rounded(bytes);
  const auto found = idle_.find(size);
  if (found != idle_.end()) {
    void* data = found->second;
    idle_.erase(found);
    allocated_.insert(data);
    return data;
  }
  if (used_ + size > kBytes) throw base::SystemError("the guarded device has no more memory");
  if (depth_ > 0 && ::mprotect(base_ + used_, size, PROT_READ | PROT_WRITE) != 0) throw base::system_error("mprotect");
  used_ += size;
  return *allocated_.insert(base_ + used_ - size).first;
}

void Arena::deallocate(void* data, std::size_t bytes) {
  if (const auto found = shared_.find(data); found != shared_.end()) {
    if (std::atomic_ref(importers_[found->second]).load() != 0) ++sharing_.freed_too_early;
    shared_.erase(found);
    --sharing_.exported;
  }
  allocated_.erase(data);
  idle_.emplace(rounded(bytes), data);
}

/// CUDA's handle of memory inside an allocation stands for the whole of it, so a handle of anything else is a mistake.
base::IpcMemoryHandle Arena::share(void* data, std::size_t bytes) {
  if (!allocated_.contains(data)) throw base::InvalidUsage("the guarded device shares whole allocations only");
  auto found = shared_.find(data);
  if (found == shared_.end()) {
    if (next_ == kMaxShared) throw base::Unsupported("the guarded device has shared too much");
    found = shared_.emplace(data, next_++).first;
    ++sharing_.exported;
  }
  const Content content{.process = base::this_process(),
                        .fd = fd_,
                        .place = found->second,
                        .offset = static_cast<std::size_t>(static_cast<std::byte*>(data) - base_),
                        .bytes = rounded(bytes)};
  base::IpcMemoryHandle handle;
  std::memcpy(handle.bytes.data(), &content, sizeof content);
  return handle;
}

void* Arena::import(const base::IpcMemoryHandle& handle) {
  Content content;
  std::memcpy(&content, handle.bytes.data(), sizeof content);
  Imported made;
  void* data = nullptr;
  if (content.process == base::this_process() && content.fd == fd_) {
    data = base_ + content.offset;
    made.importers = importers_ + content.place;
  } else {
    const std::string path = "/proc/" + std::to_string(content.process[2]) + "/fd/" + std::to_string(content.fd);
    const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) throw base::Unsupported("the guarded device can't open " + path);
    const int rights = depth_ > 0 ? PROT_READ | PROT_WRITE : PROT_NONE;
    data = ::mmap(nullptr, content.bytes, rights, MAP_SHARED | MAP_NORESERVE, fd,
                  static_cast<off_t>(kPage + content.offset));
    std::uint32_t* const page = map_first_page(fd);
    ::close(fd);
    if (data == MAP_FAILED) throw base::system_error("mmap of imported memory");
    made = {.bytes = content.bytes, .importers = page + content.place, .page = page};
  }
  std::atomic_ref(*made.importers).fetch_add(1);
  imported_.emplace(data, made);
  ++sharing_.imported;
  ++sharing_.imports;
  return data;
}

void Arena::release(void* imported) {
  const auto found = imported_.find(imported);
  if (found == imported_.end()) return;
  const Imported gone = found->second;
  imported_.erase(found);
  --sharing_.imported;
  std::atomic_ref(*gone.importers).fetch_sub(1);
  if (gone.bytes == 0) return;
  ::munmap(imported, gone.bytes);
  ::munmap(gone.page, kPage);
}

void Arena::protect(int rights) const {
  if (used_ > 0 && ::mprotect(base_, used_, rights) != 0) throw base::system_error("mprotect");
  for (const auto& [data, mapping] : imported_)
    if (mapping.bytes > 0 && ::mprotect(data, mapping.bytes, rights) != 0) throw base::system_error("mprotect");
}

}  // namespace tessera::harness
