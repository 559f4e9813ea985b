// What can be set about this backend.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/base_names.h"
#include "tessera/base/env.h"

namespace tessera::comm::tcp {

/// Which messages have a checksum over their content. Their headers always have one.
enum class Checksum : std::uint8_t { never, between_hosts, everywhere };

struct TcpOptions {
  std::string interfaces;  ///< TESSERA_IFNAME
  int streams = 0;         ///< connections between two ranks; 0: by where the ranks are
  Checksum checksum = Checksum::between_hosts;
};

/// TESSERA_IFNAME, TESSERA_TCP_CHECKSUM and TESSERA_TCP_STREAMS.
std::span<const EnvVariable> variables();
/// Over loopback one connection is as fast as the memory; between hosts a second one fills what the first leaves.
int streams_for(const TcpOptions& settings, const std::vector<std::string>& hosts);
/// By rank: whether what goes between it and `rank` has a checksum.
std::vector<bool> checked_peers(Checksum checksum, const std::vector<std::string>& hosts, int rank);
/// Throws InvalidUsage.
TcpOptions settings_from_environment();

}  // namespace tessera::comm::tcp
