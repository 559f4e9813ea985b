// A memory-mapped file for reading.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "tessera/base/export.h"

namespace tessera::base {

/// Move-only: leaves the source without a mapping. The file must not shrink while it is mapped.
class TESSERA_API MappedFile {
 public:
  MappedFile() = default;
  /// Throws InvalidUsage "PATH: REASON" if the file can't be opened or is not a regular file. An empty file maps to no
  /// bytes.
  explicit MappedFile(std::string path);

  const std::string& path() const { return path_; }  ///< path given to the constructor
  /// The mapped content; valid while this object lives.
  std::span<const std::byte> bytes() const {
    return {static_cast<const std::byte*>(data_.get()), data_ ? data_.get_deleter().bytes : 0};
  }

 private:
  struct Unmap {
    std::size_t bytes;
    void operator()(void* data) const noexcept;
  };
  std::string path_;
  std::unique_ptr<void, Unmap> data_;
};

}  // namespace tessera::base
