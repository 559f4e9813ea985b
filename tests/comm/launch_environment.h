// A launcher's variables, as resolve_launch() reads them.
#pragma once

#include <map>

#include "tessera/comm/launch.h"
#include "tests/comm/support.h"

namespace tessera::comm_test {

using Environment = std::map<std::string, std::string>;

inline Launch resolve(const Environment& environment) {
  return resolve_launch([&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    return found == environment.end() || found->second.empty() ? std::nullopt : std::optional(found->second);
  });
}

}  // namespace tessera::comm_test
