// The options of this backend.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/comm/base_names.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::tcp {

/// Selects the messages whose payload has a checksum. Headers always have one.
enum class Checksum : std::uint8_t { never, between_hosts, everywhere };

struct TcpOptions {
  std::string interfaces;  ///< TESSERA_IFNAME
  int streams = 0;         ///< connections between two ranks; 0: by host
  Checksum checksum = Checksum::between_hosts;
};

/// TESSERA_IFNAME, TESSERA_TCP_CHECKSUM and TESSERA_TCP_STREAMS.
std::span<const EnvVariable> variables();
/// Connections between two ranks. Over loopback one connection is as fast as the memory; between hosts a second one
/// uses the bandwidth that the first leaves.
int streams_for(const TcpOptions& settings, const std::vector<std::string>& hosts);
/// What all ranks must have alike, where a message has `streams` connections.
std::vector<SharedSetting> shared_settings(const TcpOptions& settings, int streams);
/// By rank: whether messages between it and `rank` have a payload checksum.
std::vector<bool> checked_peers(Checksum checksum, const std::vector<std::string>& hosts, int rank);
/// Throws InvalidUsage.
TcpOptions settings_from_environment();

}  // namespace tessera::comm::tcp
