#include "backends/tcp/settings.h"

#include <algorithm>
#include <array>

#include "tessera/base/parse.h"

namespace tessera::tcp {
namespace {

constexpr std::array<EnvVariable, 2> kVariables{{
    {"TESSERA_IFNAME", "",
     "network interfaces in order of preference: names or networks such as eth1,10.0.0.0/8; ^eth0 excludes"},
    {"TESSERA_TCP_STREAMS", "",
     "TCP connections between two ranks, over which large messages are spread, 1 to 16; else 1 where all ranks are on "
     "one host, 2 where not"},
}};

}  // namespace

std::span<const EnvVariable> variables() { return kVariables; }

int streams_for(const Settings& settings, const std::vector<std::string>& hosts) {
  if (settings.streams != 0) return settings.streams;
  return std::all_of(hosts.begin(), hosts.end(), [&](const std::string& host) { return host == hosts.front(); }) ? 1
                                                                                                                 : 2;
}

Settings settings_from_environment() {
  Settings settings;
  settings.interfaces = env_or_default(kVariables[0]);
  const std::string streams = env_or_default(kVariables[1]);
  if (!streams.empty()) settings.streams = static_cast<int>(parse_integer(streams, kVariables[1].name, 1, 16));
  return settings;
}

}  // namespace tessera::tcp
