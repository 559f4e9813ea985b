#include "tessera/base/mapped_file.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/file.h"

namespace tessera::base {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const auto fail = [this](const char* reason) { throw base::InvalidUsage(path_ + ": " + reason); };
  const base::OpenedFile file = base::open_regular(path_);
  if (!file.fd) fail(file.problem.c_str());
  if (file.bytes == 0) return;
  void* const data = ::mmap(nullptr, file.bytes, PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (data == MAP_FAILED) fail(std::strerror(errno));
  data_ = {data, {file.bytes}};
}

void MappedFile::Unmap::operator()(void* data) const noexcept { ::munmap(data, bytes); }

}  // namespace tessera::base
