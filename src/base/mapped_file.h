// A memory-mapped file for reading.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "tessera/base/export.h"

namespace tessera::base {

/// Move-only. The file must not shrink while it is mapped.
class TESSERA_API MappedFile {
 public:
  MappedFile() = default;
  /// Throws InvalidUsage "PATH: REASON" if the file can't be opened or is not a regular file. An empty file maps to no
  /// bytes.
  explicit MappedFile(std::string path);
  MappedFile(MappedFile&& other) noexcept;             ///< leaves `other` without a mapping
  MappedFile& operator=(MappedFile&& other) noexcept;  ///< exchanges the two
  ~MappedFile();

  const std::string& path() const { return path_; }  ///< path given to the constructor
  /// The mapped content; valid while this object lives.
  std::span<const std::byte> bytes() const { return {static_cast<const std::byte*>(data_), size_}; }

 private:
  std::string path_;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace tessera::base
