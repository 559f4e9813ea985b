// What the ranks tell each other beside their operations, over the world's control channel.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "backends/nccl/base.h"

namespace tessera::nccl {

struct Notice {
  enum class Kind : char {
    failure = 'F',   ///< number: its FailureKind; text: the cause
    question = 'Q',  ///< number: which question
    answer = 'A',    ///< number: which question; value: the last collective that was called
    closing = 'L',   ///< value: the last collective that was called
    call = 'C',      ///< checked mode; number: which collective; text: what this rank calls
  };
  Kind kind = Kind::closing;
  std::uint64_t communicator = 0;
  std::uint64_t number = 0;
  std::uint64_t value = 0;
  std::string text;
};

std::string format_notice(const Notice& notice);
/// Nothing where the text is not a notice.
std::optional<Notice> parse_notice(std::string_view text);

}  // namespace tessera::nccl
