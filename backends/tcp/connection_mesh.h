// The connections between all ranks of a world.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "tessera/comm/base_names.h"
#include "backends/tcp/tcp_options.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::tcp {

struct ConnectionMesh {
  std::vector<std::vector<UniqueFd>> connections;  ///< by rank and stream; none to the rank itself
  std::vector<bool> checked;                       ///< by rank: whether content has a checksum, both ways
  std::string address;                             ///< where this rank listened
};

/// Collective. Every rank listens on a port of its own and tells it through the bootstrap; the lower of two ranks
/// connects to the higher. Both ends of a connection prove the world's token; whoever can't is turned away and disturbs
/// nobody. Throws InvalidUsage (a rank's settings; on all ranks), Timeout naming the ranks that could not be reached,
/// PeerLost, SystemError.
ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout);

}  // namespace tessera::comm::tcp
