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

/// When ranks connect: all with all at the start, or two when the first message between them is sent.
enum class Connect : std::uint8_t { by_size, at_start, on_demand };

struct TcpOptions {
  std::string interfaces;  ///< TESSERA_IFNAME
  int streams = 0;         ///< connections between two ranks; 0: by host
  Checksum checksum = Checksum::between_hosts;
  bool mac = true;  ///< TESSERA_TCP_MAC: between hosts frames have MACs
  Connect connect = Connect::by_size;
};

/// TESSERA_IFNAME, TESSERA_TCP_CHECKSUM, TESSERA_TCP_CONNECT, TESSERA_TCP_MAC and TESSERA_TCP_STREAMS.
std::span<const EnvVariable> variables();
/// Connections between two ranks. Over loopback one connection is as fast as the memory; between hosts a second one
/// uses the bandwidth that the first leaves.
int streams_for(const TcpOptions& settings, const std::vector<std::string>& hosts);
/// Whether two ranks connect when the first message between them is sent, if each pair has `streams` connections. By
/// size: where a rank would have more than 48 connections. Most schedules need few of them.
bool connects_on_demand(const TcpOptions& settings, int ranks, int streams);
/// What all ranks must have alike.
std::vector<SharedSetting> shared_settings(const TcpOptions& settings, int streams, bool on_demand);
/// By rank: the codes of the frames between it and `rank`.
std::vector<FrameCodes> codes_by_rank(const TcpOptions& settings, const std::vector<std::string>& hosts, int rank);
/// Throws InvalidUsage.
TcpOptions settings_from_environment();

}  // namespace tessera::comm::tcp
