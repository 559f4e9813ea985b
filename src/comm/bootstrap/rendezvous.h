// The rendezvous of the processes of a world.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "tessera/base/export.h"
#include "tessera/base/log.h"
#include "tessera/comm/bootstrap.h"
#include "tessera/comm/launch.h"
#include "tessera/comm/rendezvous_store.h"

namespace tessera::comm {

class TlsContext;

struct RendezvousOptions {
  Launch launch;
  std::chrono::milliseconds timeout{};
  std::string master;   ///< TESSERA_MASTER: the address at which rank 0 listens; "": all ranks are on this host
  std::string token;    ///< TESSERA_TOKEN: random, 128 bits, such as `openssl rand -hex 16` makes
  std::string host_id;  ///< TESSERA_HOST_ID
  std::shared_ptr<const TlsContext> tls = nullptr;   ///< TESSERA_TLS; null: off
  std::shared_ptr<RendezvousStore> store = nullptr;  ///< replaces master and token
  /// That all ranks know already: replaces the file on this host, since ranks that are containers of one network
  /// namespace may see different files.
  std::optional<Bootstrap::Token> secret = std::nullopt;
  std::shared_ptr<Logger> logger = nullptr;  ///< null: no logging
  /// With more ranks than this the control channels form a tree, in which a rank has at most so many children.
  int largest_star = 128;
  int tree_fan_out = 8;
};

/// Waits until all ranks of the launch are connected to rank 0.
///
/// With a store, rank 0 listens at a port that the system chooses and publishes its addresses and a random key there.
/// With a master, rank 0 listens there, and the others connect to it. Without both, rank 0 listens on a Unix socket and
/// publishes its name and a random key in a file named by user and job, which only this user can read; the file is
/// removed before this returns. In all cases each side proves to the other that it knows the key. A peer that doesn't
/// know it (or belongs to another start of the run, or is a second process of one rank) is refused with an explanation,
/// without affecting the others; and a peer that answers in rank 0's place without knowing it can't end a rank's
/// search, which goes on until the deadline.
///
/// Throws Timeout naming the missing ranks, or what answered in rank 0's place, InvalidUsage (settings; a port in use;
/// two runs of one name; ranks of worlds of different size; this rank was refused), SystemError.
TESSERA_API std::shared_ptr<Bootstrap> rendezvous(const RendezvousOptions& options);

}  // namespace tessera::comm
