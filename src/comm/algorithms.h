// The algorithm table: selects an algorithm by operation and size (TESSERA_ALGO).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/types.h"

namespace tessera::comm {

/// The sizes for which an algorithm is used: from <= bytes < to.
struct AlgorithmRange {
  std::string name;                                        ///< name of the algorithm
  std::uint64_t from = 0;                                  ///< the smallest size
  std::uint64_t to = UINT64_MAX;                           ///< exceeds the largest size
  bool operator==(const AlgorithmRange&) const = default;  ///< compares all members
};

/// A parsed table such as "all_reduce=direct:0-64K;ring:64K-max,all_gather=direct". Commas separate operations,
/// semicolons separate the ranges of one. A range includes its lower end and excludes its upper end; an algorithm
/// without a range covers all sizes. Sizes are the bytes of the larger buffer. "@FILE" reads the table from a file,
/// where line ends also separate operations, spaces are ignored, and # begins a comment.
class TESSERA_API AlgorithmTable {
 public:
  AlgorithmTable() = default;
  /// `known` has entries such as "all_reduce=direct". Throws InvalidUsage, listing them, if the text names another
  /// algorithm, or if the file can't be read.
  AlgorithmTable(std::string_view text, std::span<const std::string> known);

  /// The text of a table in one line: that of the file if `text` is "@FILE". Throws InvalidUsage if it can't be read.
  static std::string one_line(std::string_view text);

  /// The algorithm for this size; "" lets the backend choose.
  std::string_view choose(OpKind kind, std::uint64_t bytes) const;

 private:
  void parse_operation(std::string_view text, std::span<const std::string> known);
  std::array<std::vector<AlgorithmRange>, kOpKinds> ranges_;
};

}  // namespace tessera::comm
