// What the ranks of a world tell each other about their operations, over a control channel, and its text.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/export.h"
#include "tessera/comm/base_names.h"

namespace tessera::comm {

struct ControlMessage {
  enum class Kind : char {
    failure = 'F',   ///< number: its FailureKind; text: the cause
    question = 'Q',  ///< number: which question
    answer = 'A',    ///< number: which question; value: the last operation that was called
    call = 'C',      ///< checked mode; number: which operation; value: its fingerprint; text: what is called
    leaving = 'L',   ///< value: the last operation that was called; text: the first failure, if there was one
    lost = 'X',      ///< never told: what the channel itself sees
    damaged = 'D',   ///< likewise
  };
  Kind kind = Kind::leaving;
  int from = 0;  ///< world rank; set by who receives it
  std::uint64_t communicator = 0;
  std::uint64_t number = 0;
  std::uint64_t value = 0;
  std::string text;
};

/// Texts of more than 4096 bytes are cut.
TESSERA_API std::string format_notice(const ControlMessage& notice);
/// Nothing where the text is not a notice.
TESSERA_API std::optional<ControlMessage> parse_notice(std::string_view text);

}  // namespace tessera::comm
