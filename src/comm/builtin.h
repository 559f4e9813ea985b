// The backends that are part of the library. The build generates the list from the folders of backends/ (add_backend).
#pragma once

#include <span>

#include "tessera/comm/registry.h"

namespace tessera::comm {

std::span<const Backend* const> builtin_backends();

}  // namespace tessera::comm
