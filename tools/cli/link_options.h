// --link, --link-intra and --hosts of commands whose ranks run: links that are slower than this machine's.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/host_collectives.h"
#include "tessera/comm/slow_link/slow_link.h"

namespace tessera::tools {

/// As given on the command line.
struct LinkOptions {
  std::string link;  ///< "": not slowed down
  std::string link_intra;
  int hosts = 1;
};

void add_link_options(CLI::App& command, LinkOptions& options);

/// Nothing without --link. Throws InvalidUsage for values that mean nothing, for devices other than the cpu, and for
/// --hosts of ranks that are on several hosts.
std::optional<comm::SlowLinks> slow_links_of(const LinkOptions& options, int ranks, const std::string& device);

/// A communicator of the same ranks over those links; null without. Collective. `world` stays as fast as it is, for
/// traffic that belongs to the measurement.
std::unique_ptr<comm::Communicator> slow_copy(comm::Communicator& world, const std::optional<comm::SlowLinks>& links);

/// That of the rank that was latest. Collective over `control`, which is not slowed down.
comm::Lateness latest(comm::HostCollectives& control, const comm::Communicator& slow);

/// "link: woke 45 us late, 0.6 % of a transfer". Warns on standard error if a run says more about this machine than
/// about the link.
std::string lateness_line(const comm::Lateness& lateness);

}  // namespace tessera::tools
