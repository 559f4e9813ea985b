#include "tools/cli/link_options.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdio>

#include "tessera/base/device.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tools/cli/output.h"
#include "tools/cli/quantities.h"
#include "tools/cli/validators.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

constexpr double kTooLatePercent = 10;

comm::SlowLink slow_link(const std::string& text, const char* option) {
  const LinkSpec spec = parse_link(text, option);
  return {std::chrono::nanoseconds(std::llround(spec.latency_us * 1e3)), spec.bytes_per_second};
}

}  // namespace

void add_link_options(CLI::App& command, LinkOptions& options) {
  add_option(command, "--link", options.link,
             "slow down the link between any two ranks, or with --hosts between hosts, such as 20us,20MB/s",
             "LATENCY,RATE");
  add_option(command, "--link-intra", options.link_intra,
             "with --link and --hosts: the link between ranks of one host (default: as --link)", "LATENCY,RATE");
  add_option(command, "--hosts", options.hosts, "with --link: hosts that the ranks divide into, in order (default: 1)",
             whole_number(1, 1 << 20));
}

std::optional<comm::SlowLinks> slow_links_of(const LinkOptions& options, int ranks, const std::string& device) {
  if (options.link.empty()) {
    if (!options.link_intra.empty()) throw InvalidUsage("--link-intra has no effect without --link; give --link too");
    if (options.hosts > 1) throw InvalidUsage("--hosts has no effect without --link; give --link too");
    return std::nullopt;
  }
  comm::SlowLinks links{.link = slow_link(options.link, "--link"), .intra = {}, .hosts = options.hosts};
  links.intra = links.link;
  if (!options.link_intra.empty()) {
    if (options.hosts == 1)
      throw InvalidUsage("--link-intra: with one host all links are those of --link; give --hosts too");
    links.intra = slow_link(options.link_intra, "--link-intra");
  }
  if (ranks % options.hosts != 0)
    throw InvalidUsage(fmt::format("--hosts {}: {} ranks don't divide into hosts of equal size; use a divisor of {}",
                                   options.hosts, ranks, ranks));
  if (base::parse_device(device).type != base::DeviceType::cpu)
    throw InvalidUsage("--link: only transfers between ranks on the cpu can be slowed down, not on device " + device);
  const comm::Launch launch = comm::resolve_launch();
  if (options.hosts > 1 && launch.local_size < launch.size)
    throw InvalidUsage(
        fmt::format("--hosts {}: the ranks of {} are on several hosts already; leave --hosts and --link-intra out",
                    options.hosts, launch.launcher));
  return links;
}

std::unique_ptr<comm::Communicator> slow_copy(comm::Communicator& world, const std::optional<comm::SlowLinks>& links) {
  return links ? comm::slow_links(world.split(0, world.rank()), *links) : nullptr;
}

comm::Lateness latest(comm::HostCollectives& control, const comm::Communicator& slow) {
  comm::Lateness lateness = comm::lateness_of(slow);
  std::array<double, 2> most = {lateness.median_us, lateness.percent};
  control.all_reduce(most.data(), most.size(), comm::ReduceOp::max(), "link");
  lateness.median_us = most[0];
  lateness.percent = most[1];
  return lateness;
}

std::string lateness_line(const comm::Lateness& lateness) {
  if (lateness.percent > kTooLatePercent)
    print_clean(stderr,
                "tessera: warning: ranks woke up {:.0f} us late, {:.0f} % of a transfer: the times are more this "
                "machine's than the link's; use a slower link, fewer ranks or a quiet machine\n",
                lateness.median_us, lateness.percent);
  return fmt::format("link: woke {:.0f} us late, {:.1f} % of a transfer{}\n", lateness.median_us, lateness.percent,
                     lateness.shared_calls ? "" : "; a transfer counts from each rank's own call");
}

}  // namespace tessera::tools
