#include "tessera/nn/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::nn {

MappedFile::MappedFile(std::string path) : path_(std::move(path)) {
  const auto fail = [this](const char* reason) { throw base::InvalidUsage(path_ + ": " + reason); };
  const int file = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) fail(std::strerror(errno));
  const struct Closed {
    int file;
    ~Closed() { ::close(file); }
  } closed{file};
  struct stat status {};
  if (::fstat(file, &status) != 0) fail(std::strerror(errno));
  if (!S_ISREG(status.st_mode)) fail("not a regular file");
  if (status.st_size == 0) return;
  void* const data = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_SHARED, file, 0);
  if (data == MAP_FAILED) fail(std::strerror(errno));
  data_ = data;
  size_ = static_cast<std::size_t>(status.st_size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : path_(std::move(other.path_)), data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace tessera::nn
