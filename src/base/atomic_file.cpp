#include "tessera/base/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/mapped_file.h"

namespace tessera::base {
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
