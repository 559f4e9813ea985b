// What the links between ranks pass, as measured between them.
#pragma once

#include "tessera/comm/communicator.h"
#include "tools/cli/quantities.h"

namespace tessera::tools {

/// Latency and rate of the line through the times of all_gathers of several sizes, over the bytes that a rank sends.
/// Collective; takes some milliseconds over fast links, a second over 100 Mbit/s. The same on every rank. Nothing moves
/// between fewer than two ranks: then the latency is 0.
LinkSpec fit_link(comm::Communicator& world);

}  // namespace tessera::tools
