// Makes untrusted text printable.
#pragma once

#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// Makes text safe for a terminal: control characters and invalid UTF-8 become `\xNN`, all but the characters `kept`,
/// such as "\n". Without these it is a single line.
TESSERA_API std::string printable(std::string_view text, std::string_view kept = "");

}  // namespace tessera::base
