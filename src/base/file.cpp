#include "tessera/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tessera/base/atomic_file.h"
#include "tessera/base/error.h"
#include "tessera/base/mapped_file.h"

namespace tessera::base {

UniqueFd::UniqueFd(int fd) noexcept : fd_(fd) {
  if (fd < STDIN_FILENO || fd > STDERR_FILENO) return;
  const int above = ::fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (above < 0) return;  // no more descriptors: the next call reports it
  fd_ = above;
  ::close(fd);
}

UniqueFd::UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

UniqueFd& UniqueFd::operator=(UniqueFd&& other) noexcept {
  if (this != &other) {
    reset();
    fd_ = std::exchange(other.fd_, -1);
  }
  return *this;
}

void UniqueFd::reset() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0) ::close(fd);
}

int UniqueFd::release() noexcept { return std::exchange(fd_, -1); }

OpenedFile open_regular(const std::string& path, int flags) {
  OpenedFile file;
  UniqueFd fd(::open(path.c_str(), O_CLOEXEC | O_NONBLOCK | flags, 0666));
  struct stat status = {};
  if (!fd || ::fstat(fd.get(), &status) != 0) {
    file.code = errno;
    file.problem = file.code == ELOOP ? "a symbolic link" : std::strerror(file.code);
  } else if (!S_ISREG(status.st_mode)) {
    file.problem = "not a regular file";
  } else {
    file.bytes = static_cast<std::uint64_t>(status.st_size);
    file.fd = std::move(fd);
  }
  return file;
}

FileText read_regular(const std::string& path, std::uint64_t limit, int flags) {
  FileText read;
  const OpenedFile file = open_regular(path, flags);
  read.problem = file.problem;
  read.text.reserve(std::min(file.bytes, limit));
  std::array<char, 65536> part{};
  const auto too_long = [&](std::uint64_t bytes) {
    if (bytes > limit) read.problem = "more than " + std::to_string(limit) + " bytes, too many for such a file";
    return bytes > limit;
  };
  // A file of /proc has no size until it is read.
  while (file.fd && !too_long(file.bytes) && !too_long(read.text.size())) {
    const ssize_t count = ::read(file.fd.get(), part.data(), part.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) read.problem = std::strerror(errno);
    if (count <= 0) break;
    read.text.append(part.data(), static_cast<std::size_t>(count));
  }
  const std::size_t zero = read.text.find('\0');
  if (read.problem.empty() && zero != std::string::npos)
    read.problem = "not a text file: byte " + std::to_string(zero) + " is zero";
  return read;
}

NewFile create_beside(const std::string& path, const std::string& infix, int flags, unsigned permissions) {
  constexpr int kMost = 1000;
  NewFile file;
  for (int number = 0; !file.fd && (number == 0 || file.code == EEXIST) && number < kMost; ++number) {
    file.path = path + infix + std::to_string(::getpid()) + "-" + std::to_string(number);
    file.fd = UniqueFd(::open(file.path.c_str(), O_CREAT | O_EXCL | O_CLOEXEC | flags, permissions));
    file.code = file.fd ? 0 : errno;
  }
  return file;
}

void open_closed_streams() noexcept {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream)
    if (::fcntl(stream, F_GETFD) < 0) [[maybe_unused]]
      const int lowest = ::open("/dev/null", O_RDWR);
}

std::size_t free_descriptors() {
  rlimit limit = {};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 0;
  std::size_t open = 0;
  if (DIR* const directory = ::opendir("/proc/self/fd")) {
    while (::readdir(directory) != nullptr) ++open;
    ::closedir(directory);
    open -= 3;  // ".", ".." and the folder's own
  }
  return limit.rlim_cur > open ? static_cast<std::size_t>(limit.rlim_cur) - open : 0;
}

void allow_descriptors(std::size_t count) {
  rlimit limit = {};
  const std::size_t free = free_descriptors();
  if (free >= count || ::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, limit.rlim_cur + (count - free));
  ::setrlimit(RLIMIT_NOFILE, &limit);  // if it fails, what can't be opened is the error
}

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

namespace {

/// Makes the names in the file's folder durable, as far as the system permits.
void sync_folder_of(const std::string& path) {
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const base::UniqueFd directory(::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory) ::fsync(directory.get());
}

void rename_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) throw base::system_error("rename to " + to);
}

}  // namespace

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  base::NewFile file = base::create_beside(path_, ".tmp-", O_WRONLY);
  if (!file.fd) throw base::InvalidUsage(path_ + ": can't be written (" + std::strerror(file.code) + ")");
  temporary_ = std::move(file.path);
  file_ = std::move(file.fd);
}

AtomicFile::~AtomicFile() {
  if (file_) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::uint64_t offset, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(file_.get(), from, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw base::system_error("write of " + path_);
    from += done;
    offset += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_.get()) != 0) throw base::system_error("fsync of " + path_);
  rename_file(temporary_, path_);
  file_.reset();
  sync_folder_of(path_);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(0, text.data(), text.size());
  file.commit();
}

void copy_file_atomically(const std::string& from, const std::string& to) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(from, ignored)) return;
  const MappedFile file(from);
  const auto* const text = reinterpret_cast<const char*>(file.bytes().data());
  write_file_atomically(to, {text, file.bytes().size()});
}

std::string made_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error || !std::filesystem::is_directory(directory, error))
    throw base::InvalidUsage(directory + ": can't be created" +
                             (error ? " (" + error.message() + ")" : ": it is not a directory"));
  return directory;
}

void commit_described(const std::string& path, std::string_view text, const std::function<void()>& commit_data) {
  AtomicFile file(path);  // what can fail comes before the first change
  file.write(0, text.data(), text.size());
  std::error_code ignored;
  const bool differs = std::filesystem::is_regular_file(path, ignored) && base::read_regular(path).text != text;
  const std::string previous = path + ".previous";
  if (differs) {
    rename_file(path, previous);
    sync_folder_of(path);
  }
  try {
    commit_data();
  } catch (...) {
    if (differs) ::rename(previous.c_str(), path.c_str());
    throw;
  }
  file.commit();
  if (differs) ::unlink(previous.c_str());
}

}  // namespace tessera::base
