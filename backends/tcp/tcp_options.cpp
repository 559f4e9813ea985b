#include "backends/tcp/tcp_options.h"

#include <algorithm>
#include <array>
#include <optional>

#include "tessera/base/parse.h"

namespace tessera::comm::tcp {
namespace {

constexpr std::array<EnvVariable, 3> kVariables{{
    {"TESSERA_IFNAME", "",
     "network interfaces in order of preference: names or networks such as eth1,10.0.0.0/8; ^eth0 excludes"},
    {"TESSERA_TCP_CHECKSUM", "",
     "checksums of message payloads: 1: all, 0: none; default: between hosts, with TESSERA_CHECK=1 all"},
    {"TESSERA_TCP_STREAMS", "",
     "TCP connections between two ranks that share large messages: 1 to 16; default: 1 on one host, else 2"},
}};

}  // namespace

std::span<const EnvVariable> variables() { return kVariables; }

int streams_for(const TcpOptions& settings, const std::vector<std::string>& hosts) {
  if (settings.streams != 0) return settings.streams;
  return std::all_of(hosts.begin(), hosts.end(), [&](const std::string& host) { return host == hosts.front(); }) ? 1
                                                                                                                 : 2;
}

std::vector<SharedSetting> shared_settings(const TcpOptions& settings, int streams) {
  const bool fixed = settings.checksum != Checksum::between_hosts;
  return {{std::string(kVariables[1].name), fixed ? std::to_string(settings.checksum == Checksum::everywhere) : ""},
          {std::string(kVariables[2].name), std::to_string(streams)}};
}

std::vector<bool> checked_peers(Checksum checksum, const std::vector<std::string>& hosts, int rank) {
  std::vector<bool> checked;
  for (const std::string& host : hosts)
    checked.push_back(checksum == Checksum::everywhere ||
                      (checksum == Checksum::between_hosts && host != hosts[static_cast<std::size_t>(rank)]));
  return checked;
}

TcpOptions settings_from_environment() {
  TcpOptions settings;
  settings.interfaces = env_or_default(kVariables[0]);
  const std::string streams = env_or_default(kVariables[2]);
  if (!streams.empty()) settings.streams = static_cast<int>(parse_integer(streams, kVariables[2].name, 1, 16));
  if (const std::optional<std::string> checksum = read_env(kVariables[1]))
    settings.checksum = parse_flag(*checksum, kVariables[1].name) ? Checksum::everywhere : Checksum::never;
  return settings;
}

}  // namespace tessera::comm::tcp
