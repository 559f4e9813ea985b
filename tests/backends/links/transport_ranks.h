// Tests of a bare transport between processes, one function per mode; a backend's test program is a main() around it.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/transport.h"

namespace tessera::link_test {

using MakeTransport = std::function<std::unique_ptr<comm::Transport>(comm::Bootstrap&, comm::TransportEvents&)>;

/// Runs one mode on this rank (see the list in the .cpp) under any launcher. Returns the exit code, and prints errors
/// to standard error.
int run_transport_ranks(const std::string& mode, const MakeTransport& make_transport);

}  // namespace tessera::link_test
