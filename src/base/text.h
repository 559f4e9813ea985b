// Makes untrusted text printable.
#pragma once

#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// Makes text safe for a terminal and a single line: control characters and invalid UTF-8 become `\xNN`.
TESSERA_API std::string printable(std::string_view text);

}  // namespace tessera::base
