#include "backends/tcp/settings.h"

#include <array>

#include "tessera/base/parse.h"

namespace tessera::tcp {
namespace {

constexpr std::array<EnvVariable, 2> kVariables{{
    {"TESSERA_IFNAME", "",
     "network interfaces in order of preference: names or networks such as eth1,10.0.0.0/8; ^eth0 excludes"},
    {"TESSERA_TCP_STREAMS", "2", "TCP connections between two ranks, over which large messages are spread; 1 to 16"},
}};

}  // namespace

std::span<const EnvVariable> variables() { return kVariables; }

Settings settings_from_environment() {
  Settings settings;
  settings.interfaces = env_or_default(kVariables[0]);
  settings.streams = static_cast<int>(parse_integer(env_or_default(kVariables[1]), kVariables[1].name, 1, 16));
  return settings;
}

}  // namespace tessera::tcp
