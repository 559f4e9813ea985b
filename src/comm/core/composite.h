// A communicator composed of two backends: one for ranks that share a host, the other between hosts.
#pragma once

#include <memory>

#include "tessera/base/export.h"
#include "tessera/comm/communicator.h"

namespace tessera::comm {

/// `near` spans the members of `far` that share this rank's host, in far's order. Communicators within one host use
/// `near`, all others `far`; memory comes from `near`. The reported backend is the one in use.
TESSERA_API std::unique_ptr<Communicator> compose(std::unique_ptr<Communicator> near,
                                                  std::unique_ptr<Communicator> far);

}  // namespace tessera::comm
