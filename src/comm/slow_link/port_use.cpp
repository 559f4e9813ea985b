#include "tessera/comm/slow_link/port_use.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tessera/comm/core/op_traits.h"
#include "tessera/comm/core/read_plan.h"

namespace tessera::comm {
namespace {

using std::chrono::nanoseconds;

/// Messages in a row: an all_reduce reduces and then gathers.
int rounds_of(OpKind kind, int ranks) {
  if (kind == OpKind::barrier) return std::bit_width(static_cast<unsigned>(ranks - 1));
  return kind == OpKind::all_reduce ? 2 : 1;
}

}  // namespace

PortUse port_use(const LinkedGroup& group, std::span<const OpDesc> calls) {
  const auto ranks = static_cast<int>(group.members.size());
  const auto host_of = [&](int member) {
    return group.members[static_cast<std::size_t>(member)] / (group.world_size / group.links.hosts);
  };
  const auto port_to = [&](int peer) -> std::size_t { return host_of(peer) == host_of(group.rank) ? 0 : 1; };
  const auto link = [&](std::size_t port) {
    return port == 0 && group.links.hosts > 1 ? group.links.intra : group.links.link;
  };
  PortUse use;
  std::array<double, kPorts> sent{}, received{};
  std::size_t farthest = 0;
  int rounds = 0;
  for (const OpDesc& call : calls) {
    const ReadPlan plan(call, group.rank, ranks);
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == group.rank || (is_message(call.kind) && peer != call.root)) continue;
      const std::size_t port = port_to(peer);
      farthest = std::max(farthest, port);
      const std::uint64_t bytes = plan.bytes_from(peer);
      sent[port] += static_cast<double>(plan.bytes_to(peer));
      received[port] += static_cast<double>(bytes);
      if (!is_message(call.kind) && (bytes > 0 || call.kind == OpKind::barrier)) use.senders.push_back(peer);
    }
    rounds = std::max(rounds, rounds_of(call.kind, ranks));
  }
  use.latency = link(farthest).latency * rounds;
  for (std::size_t port = 0; port < kPorts; ++port)
    use.occupied[port] =
        nanoseconds(std::llround(std::max(sent[port], received[port]) / link(port).bytes_per_second * 1e9));
  return use;
}

}  // namespace tessera::comm
