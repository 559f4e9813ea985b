// What must hold for any bytes that come over a control connection.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/bootstrap/protocol.h"

namespace tessera::fuzz {

/// Takes a payload apart and puts it together again; nothing where it is refused.
using Again = std::function<std::optional<std::string>(std::string_view payload)>;

/// For each kind of message, as the library does it.
std::vector<Again> messages();

/// "" or what does not hold: frames are the same however the bytes are cut into pieces, as a plain reading of them
/// says; none is longer than allowed; what is broken stays broken; and a message that is taken for one is written back
/// as the same bytes.
std::string broken_property(std::string_view bytes, const std::vector<Again>& messages);

/// Frames and messages as ranks really send them.
std::vector<std::string> seeds();

}  // namespace tessera::fuzz
