// Which algorithm carries which operation at which size: TESSERA_ALGO.
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

/// "all_reduce=direct:0-64K;ring:64K-max,all_gather=direct": operations separated by commas, their ranges by
/// semicolons; a range covers its lower end and not its upper one; without a range an algorithm covers all sizes. Bytes
/// are those of the larger buffer. "@FILE" reads this from a file: operations may then also be separated by line ends,
/// spaces are ignored, and # begins a comment.
class TESSERA_API AlgorithmTable {
 public:
  AlgorithmTable() = default;
  /// `known` has entries such as "all_reduce=direct". Throws InvalidUsage listing them where something else is named,
  /// or where the file can't be read.
  AlgorithmTable(std::string_view text, std::span<const std::string> known);

  /// The name for this size, or "": the backend chooses.
  std::string_view choose(OpKind kind, std::uint64_t bytes) const;

 private:
  struct Range {
    std::uint64_t from = 0;
    std::uint64_t to = UINT64_MAX;
    std::string name;
  };
  void parse(std::string_view text, std::span<const std::string> known);
  void parse_operation(std::string_view text, std::span<const std::string> known);
  std::array<std::vector<Range>, kOpKinds> ranges_;
};

}  // namespace tessera::comm
