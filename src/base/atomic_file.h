// A file that becomes visible under its name only when it is complete.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/base/file.h"

namespace tessera::base {

/// Writes go to a temporary file beside the target. The destructor removes it if commit() was not called.
class TESSERA_API AtomicFile {
 public:
  /// Throws InvalidUsage "PATH: can't be written (REASON)".
  explicit AtomicFile(std::string path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  const std::string& path() const { return path_; }  ///< path of the target
  /// Throws SystemError.
  void write(std::uint64_t offset, const void* data, std::size_t bytes);
  /// Flushes to disk and renames the temporary file to the target. Throws SystemError.
  void commit();

 private:
  const std::string path_;
  std::string temporary_;
  UniqueFd file_;
};

/// Replaces the file's content with `text`; on failure the file keeps its previous content.
TESSERA_API void write_file_atomically(const std::string& path, std::string_view text);

/// Copies a regular file, which may be named by a link, as a whole; nothing if there is none. Throws InvalidUsage.
TESSERA_API void copy_file_atomically(const std::string& from, const std::string& to);

/// Creates a directory and those above it, and returns its name. Throws InvalidUsage.
TESSERA_API std::string made_directory(const std::string& directory);

/// Replaces two files that belong together: `commit_data` replaces the data by one rename, and `text` becomes the
/// content of `path`, which describes the data. No reader finds the description of one save with the data of another,
/// even if the process is killed: before the data changes, a description with other content is renamed to
/// PATH.previous, which is removed at the end. If `commit_data` throws, both files keep their previous content.
TESSERA_API void commit_described(const std::string& path, std::string_view text,
                                  const std::function<void()>& commit_data);

}  // namespace tessera::base
