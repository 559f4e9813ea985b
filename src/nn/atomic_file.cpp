#include "tessera/nn/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::nn {

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  const std::string prefix = path_ + ".tmp-" + std::to_string(::getpid()) + "-";
  for (int attempt = 0; file_ < 0; ++attempt) {
    temporary_ = prefix + std::to_string(attempt);
    file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ < 0 && (errno != EEXIST || attempt > 1000))
      throw base::InvalidUsage(path_ + ": can't be written (" + std::strerror(errno) + ")");
  }
}

AtomicFile::~AtomicFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::uint64_t offset, const void* data, std::size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(file_, from, bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) throw base::system_error("write of " + path_);
    from += done;
    offset += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::size_t>(done);
  }
}

void AtomicFile::commit() {
  if (::fsync(file_) != 0) throw base::system_error("fsync of " + path_);
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) throw base::system_error("rename to " + path_);
  ::close(std::exchange(file_, -1));
  const std::string parent = std::filesystem::path(path_).parent_path().string();
  const int directory = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory < 0) return;  // the rename succeeded; only its durability can't be requested
  ::fsync(directory);
  ::close(directory);
}

void write_file_atomically(const std::string& path, std::string_view text) {
  AtomicFile file(path);
  file.write(0, text.data(), text.size());
  file.commit();
}

std::string made_directory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error || !std::filesystem::is_directory(directory, error))
    throw base::InvalidUsage(directory + ": can't be created" +
                             (error ? " (" + error.message() + ")" : ": it is not a directory"));
  return directory;
}

}  // namespace tessera::nn
