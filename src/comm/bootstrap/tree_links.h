// The connections of the tree that carries the control channels of a large world.
#pragma once

#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap/control_tree.h"
#include "tessera/comm/bootstrap/handshake.h"
#include "tessera/comm/bootstrap/socket.h"

namespace tessera::comm {

/// Connects this rank with its neighbours and returns the connections by rank. Collective: the ranks exchange where
/// they listen. All throw the same Error, which names a rank that is missing.
TESSERA_API std::vector<Connection> connect_tree(Bootstrap& ranks, const RankIdentity& self, const ControlTree& tree,
                                                 Deadline deadline);

}  // namespace tessera::comm
