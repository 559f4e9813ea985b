// How processes on one host find each other.
#pragma once

#include <chrono>
#include <memory>

#include "tessera/comm/bootstrap.h"
#include "tessera/comm/launch.h"

namespace tessera::comm {

/// Waits until all ranks of the launch are connected. Rank 0 listens on a Unix socket and publishes its address and a
/// random token in a file that only this user can read, named by user and job; the others prove the token. The file is
/// gone when this returns; the connections stay, and tell the death of a rank. Throws Timeout naming the ranks that did
/// not come, InvalidUsage (two runs of one name), SystemError.
std::shared_ptr<Bootstrap> meet(const Launch& launch, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
