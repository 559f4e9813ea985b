// What can be set about this backend.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "backends/tcp/base.h"
#include "tessera/base/env.h"

namespace tessera::tcp {

struct Settings {
  std::string interfaces;  ///< TESSERA_IFNAME
  int streams = 0;         ///< connections between two ranks; 0: by where the ranks are
};

/// TESSERA_IFNAME and TESSERA_TCP_STREAMS.
std::span<const EnvVariable> variables();
/// Over loopback one connection is as fast as the memory; between hosts a second one fills what the first leaves.
int streams_for(const Settings& settings, const std::vector<std::string>& hosts);
/// Throws InvalidUsage.
Settings settings_from_environment();

}  // namespace tessera::tcp
