// Where a benchmark ran: what `tessera bench --json` writes as `environment`.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"

namespace tessera::tools {

/// Collective: {"hosts": [..], "ranks": [..], "libraries": [..]}, the same on every rank. Each host is described by its
/// lowest rank. An empty object if the algorithm that TESSERA_ALGO forces can't gather it.
nlohmann::ordered_json gather_environment(comm::HostCollectives& world);

/// The least nominal rate between the hosts.
struct NominalLink {
  double gbps = 0;   ///< GB = 1e9 bytes
  std::string name;  ///< "eth0 of node1, 10000 Mbit/s"
};
/// Of each host the fastest interface counts. Nothing if all ranks share a host, or an interface's rate is not known.
std::optional<NominalLink> nominal_link(const nlohmann::ordered_json& environment);

/// A sentence for each host whose load average exceeds its cores: its times are doubtful.
std::vector<std::string> load_warnings(const nlohmann::ordered_json& environment);

/// What differs between two of these objects and may change times, "host 0: kernel 6.1.0 -> 6.1.2": each host's
/// description by its position, each backend's ranks and libraries. Neither the command nor a load within the cores
/// counts.
std::vector<std::string> environment_differences(const nlohmann::ordered_json& before,
                                                 const nlohmann::ordered_json& after);

}  // namespace tessera::tools
