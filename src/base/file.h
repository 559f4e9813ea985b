// Files given by the user, opened without blocking.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/base/export.h"

namespace tessera::base {

/// Owns a file descriptor, which is never 0, 1 or 2: if a standard stream of the program is closed, the system gives
/// its number to the next file, and what the program prints would go there.
class TESSERA_API UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) noexcept;              ///< becomes the owner of `fd`, or moves it; negative: owns nothing
  UniqueFd(UniqueFd&& other) noexcept;             ///< leaves `other` empty
  UniqueFd& operator=(UniqueFd&& other) noexcept;  ///< closes the current descriptor and leaves `other` empty
  ~UniqueFd() { reset(); }
  void reset() noexcept;                    ///< closes the descriptor, if any
  int release() noexcept;                   ///< returns the descriptor, which the caller then closes; -1 if empty
  int get() const noexcept { return fd_; }  ///< still owned by this object; -1 if empty
  explicit operator bool() const noexcept { return fd_ >= 0; }  ///< true if it owns a descriptor

 private:
  int fd_ = -1;
};

/// The result of open_regular().
struct OpenedFile {
  UniqueFd fd;              ///< empty if the file isn't open
  std::uint64_t bytes = 0;  ///< size of the file when it was opened
  int code = 0;             ///< errno if it can't be opened; 0 if it is not a regular file
  std::string problem;      ///< "No such file or directory", "not a regular file"; "" if it is open
};

/// Opens a regular file, for reading unless `flags` say otherwise. A FIFO doesn't block: FIFOs, directories, devices
/// and sockets are reported as a problem, and with O_NOFOLLOW a link, too: others can foresee the names of some files.
/// `flags` are added to O_CLOEXEC and O_NONBLOCK for open(). Doesn't throw.
TESSERA_API OpenedFile open_regular(const std::string& path, int flags = 0);

/// The result of read_regular().
struct FileText {
  std::string text;  ///< incomplete if `problem` isn't empty
  /// OpenedFile::problem, or a zero byte, at which parsers would stop; "" if `text` is the whole file.
  std::string problem;
};

/// The limit for a text file that says nothing about its size: far more than such files have.
inline constexpr std::uint64_t kMaxTextBytes = std::uint64_t{256} << 20;

/// Reads a regular text file. A file of more than `limit` bytes is a problem, and isn't read. `flags`: of
/// open_regular().
TESSERA_API FileText read_regular(const std::string& path, std::uint64_t limit = kMaxTextBytes, int flags = 0);

/// The result of create_beside().
struct NewFile {
  UniqueFd fd;       ///< empty if none could be created
  std::string path;  ///< path of the file
  int code = 0;      ///< errno if none could be created
};

/// Creates a file of a new name beside `path`: PATH, `infix`, process, number. It never opens a file or follows a link
/// that is there already. `flags`: O_WRONLY, or O_RDWR and others. Doesn't throw.
TESSERA_API NewFile create_beside(const std::string& path, const std::string& infix, int flags,
                                  unsigned permissions = 0666);

/// Opens /dev/null in place of standard streams that are closed, so that descriptors which other libraries open don't
/// become one.
TESSERA_API void open_closed_streams() noexcept;

/// How many more descriptors this process may open. Doesn't account for those that other threads open meanwhile.
TESSERA_API std::size_t free_descriptors();

/// Raises the soft limit of open files (ulimit -n), at most to the hard one, if this process could not open `count`
/// more. The limit stays raised, since the descriptors may stay open, and processes that this one starts inherit it.
TESSERA_API void allow_descriptors(std::size_t count);

}  // namespace tessera::base
