// One communicator from two backends: one for ranks that share a host, the other between hosts.
#pragma once

#include <memory>

#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// `near` joins the members of `far` that share this rank's host, in far's order. What spans one host goes over `near`,
/// everything else over `far`; memory comes from `near`. Its backend is that of the one which carries it.
std::unique_ptr<Communicator> compose(std::unique_ptr<Communicator> near, std::unique_ptr<Communicator> far);

}  // namespace tessera::comm
