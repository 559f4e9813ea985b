// Text of others, before people see it.
#pragma once

#include <string>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::base {

/// For a terminal and for one line: control characters, and bytes that are no UTF-8, become \xNN.
TESSERA_API std::string printable(std::string_view text);

}  // namespace tessera::base
