// The options of this backend, and its entry in the registry.
#include "backends/tcp/tcp_options.h"

#include <algorithm>
#include <array>
#include <optional>

#include "backends/tcp/transport.h"
#include "tessera/base/parse.h"
#include "tessera/comm/host_communicator.h"
#include "tessera/comm/registry.h"

namespace tessera::comm::tcp {
namespace {

constexpr std::int64_t kFewConnections = 48;
constexpr std::array<std::string_view, 2> kConnectNames{"start", "demand"};

constexpr EnvVariable kInterfaces{
    "TESSERA_IFNAME", "",
    "network interfaces in order of preference: names or networks such as eth1,10.0.0.0/8; ^eth0 excludes"};
constexpr EnvVariable kChecksum{
    "TESSERA_TCP_CHECKSUM", "",
    "checksums of payloads that have no MAC: 1: all, 0: none; default: between hosts, with TESSERA_CHECK=1 all"};
constexpr EnvVariable kConnect{
    "TESSERA_TCP_CONNECT", "",
    "start: all ranks connect with all when the world starts; demand: two ranks connect when the first message is "
    "sent; default: demand if a rank would have more than 48 connections"};
constexpr EnvVariable kMac{"TESSERA_TCP_MAC", "on",
                           "off: messages between hosts have no keyed code, and a device on the way can change them"};
constexpr EnvVariable kStreams{
    "TESSERA_TCP_STREAMS", "",
    "TCP connections between two ranks that share large messages: 1 to 16; default: 1 on one host, else 2"};
constexpr std::array kVariables{kInterfaces, kChecksum, kConnect, kMac, kStreams};

}  // namespace

std::span<const EnvVariable> variables() { return kVariables; }

int streams_for(const TcpOptions& settings, const std::vector<std::string>& hosts) {
  if (settings.streams != 0) return settings.streams;
  return std::ranges::all_of(hosts, [&](const std::string& host) { return host == hosts.front(); }) ? 1 : 2;
}

bool connects_on_demand(const TcpOptions& settings, int ranks, int streams) {
  if (settings.connect != Connect::by_size) return settings.connect == Connect::on_demand;
  return std::int64_t{ranks - 1} * streams > kFewConnections;
}

std::vector<SharedSetting> shared_settings(const TcpOptions& settings, int streams, bool on_demand) {
  const bool fixed = settings.checksum != Checksum::between_hosts;
  return {{std::string(kChecksum.name), fixed ? std::to_string(settings.checksum == Checksum::everywhere) : ""},
          {std::string(kConnect.name), std::string(kConnectNames[on_demand ? 1 : 0])},
          {std::string(kMac.name), settings.mac ? "on" : "off"},
          {std::string(kStreams.name), std::to_string(streams)}};
}

std::vector<FrameCodes> codes_by_rank(const TcpOptions& settings, const std::vector<std::string>& hosts, int rank) {
  std::vector<FrameCodes> codes;
  for (const std::string& host : hosts) {
    const bool between_hosts = host != hosts[static_cast<std::size_t>(rank)];
    const bool checked =
        settings.checksum == Checksum::everywhere || (settings.checksum == Checksum::between_hosts && between_hosts);
    codes.push_back(settings.mac && between_hosts ? FrameCodes::macs
                    : checked                     ? FrameCodes::checksums
                                                  : FrameCodes::header_checksum);
  }
  return codes;
}

TcpOptions settings_from_environment() {
  TcpOptions settings;
  settings.interfaces = env_or_default(kInterfaces);
  const std::string streams = env_or_default(kStreams);
  if (!streams.empty()) settings.streams = static_cast<int>(parse_integer(streams, kStreams.name, 1, 16));
  if (const std::optional<std::string> checksum = read_env(kChecksum))
    settings.checksum = parse_flag(*checksum, kChecksum.name) ? Checksum::everywhere : Checksum::never;
  if (const std::optional<std::string> connect = read_env(kConnect))
    settings.connect = parse_name(*connect, kConnect.name, kConnectNames) == 0 ? Connect::at_start : Connect::on_demand;
  settings.mac = parse_flag(env_or_default(kMac), kMac.name);
  return settings;
}

namespace {

std::unique_ptr<Communicator> create(std::shared_ptr<Bootstrap> bootstrap, const BackendOptions& options) {
  return make_host_communicator(std::move(bootstrap), options, "tcp",
                                [](Bootstrap& others, TransportEvents& events, const BackendOptions& world) {
                                  return make_transport(others, events, world);
                                });
}

}  // namespace

const comm::Backend& backend();  // declared by the generated list
const comm::Backend& backend() {
  static const comm::Backend kBackend{.name = "tcp",
                                      .devices = "cpu",
                                      .probe = [] { return std::string(); },
                                      .create = create,
                                      .variables = variables(),
                                      .encrypts = true};
  return kBackend;
}

}  // namespace tessera::comm::tcp
