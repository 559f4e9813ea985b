// Reads and writes ranges of safetensors files. Format: https://github.com/huggingface/safetensors (8 bytes of
// little-endian header length, a JSON header, then the tensors).
//
// Files are untrusted input: every length, offset and shape is checked before use. An error throws InvalidUsage with
// one line, "PATH: what".
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/atomic_file.h"
#include "tessera/base/mapped_file.h"
#include "tessera/nn/init.h"
#include "tessera/nn/types.h"

namespace tessera::nn {

/// A tensor of a file.
struct SafetensorsEntry {
  std::string name;               ///< unique in the file
  std::string dtype;              ///< dtype as spelled in the file: "F32", "BF16", "BOOL", ...
  std::size_t element_bytes = 0;  ///< size of one element
  Shape shape;                    ///< empty for a scalar
  std::uint64_t begin = 0;        ///< begin in bytes after the header
  std::uint64_t end = 0;          ///< after the last byte; on the same scale as `begin`
  std::int64_t count() const { return static_cast<std::int64_t>((end - begin) / element_bytes); }  ///< elements
  /// Whether a tensor of `dtype` can be read from it: f32 from any floating-point type, others only from their own.
  TESSERA_API bool holds(DType dtype) const;
};

/// Longer headers are rejected, as by the reference implementation.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// Entries and metadata of a file.
struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;        ///< entries in the file's order
  std::map<std::string, std::string> metadata;  ///< the header's "__metadata__"
};
/// Parses and checks the header of a file whose data part has `data_bytes` bytes; `origin` names the file in errors.
TESSERA_API SafetensorsHeader parse_safetensors_header(std::string_view json, std::uint64_t data_bytes,
                                                       const std::string& origin);

/// A memory-mapped file. Thread-safe.
class TESSERA_API SafetensorsFile {
 public:
  /// Maps the file and checks its header. Throws InvalidUsage.
  explicit SafetensorsFile(const std::string& path);
  const std::string& path() const { return file_.path(); }                          ///< path given to the constructor
  const std::vector<SafetensorsEntry>& entries() const { return header_.entries; }  ///< entries in the file's order
  /// The header's "__metadata__".
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Returns null if there is no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;
  /// The bytes of an entry of this file, with any alignment.
  std::span<const std::byte> bytes(const SafetensorsEntry& entry) const;
  /// Reads elements `range` of a floating-point entry, converted to f32 (from F64 rounded to nearest).
  void read(const SafetensorsEntry& entry, ElementRange range, float* out) const;
  /// Reads the whole entry without conversion. Throws InvalidUsage if its type is not `dtype`, or if `out` has another
  /// length.
  void read_whole(const SafetensorsEntry& entry, DType dtype, std::span<std::byte> out) const;

 private:
  MappedFile file_;
  SafetensorsHeader header_;
  std::size_t data_begin_ = 0;
  std::map<std::string, std::size_t, std::less<>> index_;
};

/// A tensor to be written.
struct SafetensorsTensor {
  std::string name;          ///< unique in the file
  Shape shape;               ///< shape of the whole tensor
  DType dtype = DType::f32;  ///< dtype in the file
};

/// Writes tensors, most of them f32: the constructor writes the header, then any ranges are written in any order, then
/// commit(). Until commit() only a temporary file beside the target exists; the destructor removes it if commit() was
/// not called.
class TESSERA_API SafetensorsWriter {
 public:
  /// Throws InvalidUsage if the path can't be written, SystemError if writing fails.
  SafetensorsWriter(std::string path, const std::vector<SafetensorsTensor>& tensors,
                    const std::map<std::string, std::string>& metadata);
  ~SafetensorsWriter();

  void write(std::string_view name, ElementRange range, const float* values);  ///< writes a range of an f32 tensor
  /// The whole of a tensor of any type. Throws InvalidUsage if it has another length.
  void write_whole(std::string_view name, std::span<const std::byte> values);
  /// Flushes to disk and renames the temporary file to the target. Throws InvalidUsage if elements are missing.
  void commit();

 private:
  struct Place {
    std::uint64_t offset = 0;
    std::int64_t count = 0;
    DType dtype = DType::f32;
    std::int64_t written = 0;
  };
  Place& place_of(std::string_view name);
  std::unique_ptr<AtomicFile> file_;
  std::map<std::string, Place, std::less<>> places_;
};

}  // namespace tessera::nn
