// Messages about operations that the ranks of a world exchange over a control channel, and their text format.
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
    question = 'Q',  ///< number: the question's
    answer = 'A',    ///< number: the question's; value: the last operation called
    call = 'C',      ///< checked mode; number: the operation's; value: its fingerprint; text: its signature
    leaving = 'L',   ///< value: the last operation called; text: the first failure, if any
    lost = 'X',      ///< never sent: reported by the channel itself
    damaged = 'D',   ///< likewise
  };
  Kind kind = Kind::leaving;
  int from = 0;  ///< world rank; set by the receiver
  std::uint64_t communicator = 0;
  std::uint64_t number = 0;
  std::uint64_t value = 0;
  std::string text;
};

/// Truncates texts of more than 4096 bytes.
TESSERA_API std::string format_notice(const ControlMessage& notice);
/// Empty if the text is not a notice.
TESSERA_API std::optional<ControlMessage> parse_notice(std::string_view text);

}  // namespace tessera::comm
