// Properties that hold for any bytes received over a control connection.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/bootstrap/protocol.h"

namespace tessera::fuzz {

/// Decodes a payload and encodes it again; nullopt if decoding rejects it.
using Again = std::function<std::optional<std::string>(std::string_view payload)>;

/// The library's decoder and encoder for each kind of message.
std::vector<Again> messages();

/// "" or the violated property: frames don't depend on how the bytes are split into chunks and equal those of a second
/// reader; no frame is longer than allowed; a broken stream stays broken; and a message that decodes is encoded to the
/// same bytes.
std::string broken_property(std::string_view bytes, const std::vector<Again>& messages);

/// Frames and messages that ranks send in practice.
std::vector<std::string> seeds();

}  // namespace tessera::fuzz
