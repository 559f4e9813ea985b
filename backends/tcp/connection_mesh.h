// The connections between all ranks of a world.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "backends/tcp/mesh_connector.h"
#include "backends/tcp/tcp_options.h"
#include "tessera/comm/bootstrap.h"

namespace tessera::comm::tcp {

struct ConnectionMesh {
  std::unique_ptr<MeshConnector> connector;              ///< makes the connections on demand; null: all are made
  std::vector<std::vector<MeshConnection>> connections;  ///< by rank and stream; empty for the rank itself
  std::vector<FrameCodes> codes;                         ///< by rank: of the frames in both directions
  std::string address;                                   ///< the address that this rank listens on
};

/// Collective. Every rank listens on a port of its own and publishes it through the bootstrap; if the settings connect
/// at the start, the lower of two ranks then connects to the higher. Both ends of a connection authenticate with the
/// world's token; a connection that fails this is closed and does not disturb the ranks. `tls`: encrypts them; may be
/// null. Throws InvalidUsage (a rank's settings; on all ranks), Timeout naming the unreachable ranks, PeerLost,
/// SystemError.
ConnectionMesh connect_mesh(Bootstrap& bootstrap, const TcpOptions& settings, std::chrono::milliseconds timeout,
                            const TlsContext* tls);

}  // namespace tessera::comm::tcp
