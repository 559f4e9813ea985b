// Creates a world communicator from a backend's name, also of two backends: one for ranks that share a host, the other
// between hosts.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tessera/base/export.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/registry.h"

namespace tessera::comm {

/// `near` spans the members of `far` that share this rank's host, in far's order. Communicators within one host use
/// `near`, all others `far`; memory comes from `near`. The reported backend is the one in use.
TESSERA_API std::unique_ptr<Communicator> compose(std::unique_ptr<Communicator> near,
                                                  std::unique_ptr<Communicator> far);

/// `name` is a backend, "near+far" (near for communicators whose members share a host, far for all others) or "auto":
/// the best of the library's own backends, composed in the same way. Compares what all ranks must have alike, and
/// completes `options`: the mode (`deterministic`, else the backend's default) and the text of the algorithm table.
/// Collective. Throws InvalidUsage (unknown or unusable names, two parts that don't match, settings that differ) and
/// the backends' errors.
std::unique_ptr<Communicator> make_world(const std::string& name, std::shared_ptr<Bootstrap> bootstrap,
                                         BackendOptions& options, std::optional<bool> deterministic);

}  // namespace tessera::comm
