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
    failure = 'F',         ///< number: its FailureKind; text: the cause
    progress_query = 'Q',  ///< number: the query's
    progress_reply = 'A',  ///< number: the query's; value: the last operation called
    op_signature = 'C',    ///< checked mode; number: the operation's; value: its fingerprint; text: its signature
    group_key = 'G',       ///< text: what the members of a new communicator need of its first one
    symmetric = 'S',       ///< number: of the step; value: the bytes; text: why it can't, or what has failed, or ""
    departure = 'L',       ///< value: the last operation called; text: the first failure, if any
    peer_lost = 'X',       ///< never sent: reported by the channel itself
    damaged = 'D',         ///< likewise
  };
  Kind kind = Kind::departure;
  int from = 0;  ///< world rank; set by the receiver
  std::uint64_t communicator = 0;
  std::uint64_t number = 0;
  std::uint64_t value = 0;
  std::string text;
};

/// Truncates texts of more than 4096 bytes.
TESSERA_API std::string format_message(const ControlMessage& message);
/// Empty if the text is not such a message.
TESSERA_API std::optional<ControlMessage> parse_message(std::string_view text);

}  // namespace tessera::comm
