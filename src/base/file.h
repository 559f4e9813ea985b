// Files that others name: opened without waiting for anybody.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/base/export.h"

namespace tessera::base {

/// Owns a file descriptor.
class TESSERA_API UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept;
  UniqueFd& operator=(UniqueFd&& other) noexcept;
  ~UniqueFd() { reset(); }
  void reset() noexcept;
  int release() noexcept;
  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct OpenedFile {
  UniqueFd fd;
  std::uint64_t bytes = 0;
  int code = 0;         ///< errno where it can't be opened; 0 where it is not a regular file
  std::string problem;  ///< "No such file or directory", "not a regular file"; "" where it is open
};

/// Opens a regular file for reading. A FIFO is not waited for: it, a folder, a device and a socket are a problem.
/// `flags`: of open(), beside O_RDONLY, O_CLOEXEC and O_NONBLOCK. Does not throw.
TESSERA_API OpenedFile open_regular(const std::string& path, int flags = 0);

struct FileText {
  std::string text;
  std::string problem;  ///< as above; "" where `text` is all of the file
};

/// The content of a regular file.
TESSERA_API FileText read_regular(const std::string& path);

/// How many more this process may open. What others open meanwhile is not in it.
TESSERA_API std::size_t free_descriptors();

}  // namespace tessera::base
