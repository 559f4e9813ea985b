// Creates a world communicator from a backend's name.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/registry.h"

namespace tessera::comm {

/// `name` is a backend, "near+far" (near for communicators whose members share a host, far for all others) or "auto":
/// the best of the library's own backends, composed in the same way. Compares what all ranks must have alike, and
/// completes `options`: the mode (`deterministic`, else the backend's default) and the text of the algorithm table.
/// Collective. Throws InvalidUsage (unknown or unusable names, two parts that don't match, settings that differ) and
/// the backends' errors.
std::unique_ptr<Communicator> make_world(const std::string& name, std::shared_ptr<Bootstrap> bootstrap,
                                         BackendOptions& options, std::optional<bool> deterministic);

}  // namespace tessera::comm
