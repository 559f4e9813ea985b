// What can be set about this backend.
#pragma once

#include <span>
#include <string>

#include "backends/tcp/base.h"
#include "tessera/base/env.h"

namespace tessera::tcp {

struct Settings {
  std::string interfaces;  ///< TESSERA_IFNAME
  int streams = 2;         ///< connections between two ranks
};

/// TESSERA_IFNAME and TESSERA_TCP_STREAMS.
std::span<const EnvVariable> variables();
/// Throws InvalidUsage.
Settings settings_from_environment();

}  // namespace tessera::tcp
