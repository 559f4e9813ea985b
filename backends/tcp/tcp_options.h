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

/// What the frames between two ranks carry: a checksum of the header, also one of the payload, or MACs of both.
enum class FrameCodes : std::uint8_t { header_checksum, checksums, macs };

/// Selects the messages without MACs whose payload has a checksum. Headers always have one.
enum class Checksum : std::uint8_t { never, between_hosts, everywhere };

struct TcpOptions {
  std::string interfaces;  ///< TESSERA_IFNAME
  int streams = 0;         ///< connections between two ranks; 0: by host
  Checksum checksum = Checksum::between_hosts;
  bool mac = true;  ///< TESSERA_TCP_MAC: between hosts frames have MACs
};

/// TESSERA_IFNAME, TESSERA_TCP_CHECKSUM, TESSERA_TCP_MAC and TESSERA_TCP_STREAMS.
std::span<const EnvVariable> variables();
/// Connections between two ranks. Over loopback one connection is as fast as the memory; between hosts a second one
/// uses the bandwidth that the first leaves.
int streams_for(const TcpOptions& settings, const std::vector<std::string>& hosts);
/// What all ranks must have alike, where a message has `streams` connections.
std::vector<SharedSetting> shared_settings(const TcpOptions& settings, int streams);
/// By rank: the codes of the frames between it and `rank`.
std::vector<FrameCodes> codes_by_rank(const TcpOptions& settings, const std::vector<std::string>& hosts, int rank);
/// Throws InvalidUsage.
TcpOptions settings_from_environment();

}  // namespace tessera::comm::tcp
