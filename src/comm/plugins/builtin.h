// The backends that are part of the library. The build generates the list from the directories of backends/
// (add_backend).
#pragma once

#include <span>

#include "tessera/comm/registry.h"

namespace tessera::comm {

std::span<const Backend* const> builtin_backends();

/// A module of the project that was not built.
struct BackendNotBuilt {
  std::string_view name;
  std::string_view reason;
};
std::span<const BackendNotBuilt> backends_not_built();

}  // namespace tessera::comm
