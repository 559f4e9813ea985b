// Communicators over a Transport: the collectives with their order, deadlines and errors, common to all point-to-point
// backends.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/registry.h"
#include "tessera/comm/transport.h"

namespace tessera::comm {

/// Connects this rank with all ranks of the bootstrap. Collective; throws Timeout, PeerLost, InvalidUsage, SystemError.
/// `events` outlives the transport, but must not be called before the factory returns.
using TransportFactory = std::function<std::unique_ptr<Transport>(Bootstrap& bootstrap, TransportEvents& events,
                                                                  const BackendOptions& options)>;

/// Creates the world communicator of the backend `name` over the factory's transport. Collective. Every rank has a
/// progress engine and a control channel of that name. `native` lists the operations that the transport may implement
/// as a whole (Transport::native()); they are used if sums need no fixed order.
TESSERA_API std::unique_ptr<Communicator> make_host_communicator(std::shared_ptr<Bootstrap> bootstrap,
                                                                 const BackendOptions& options, const std::string& name,
                                                                 const TransportFactory& make_transport,
                                                                 std::span<const OpKind> native = {});

}  // namespace tessera::comm
