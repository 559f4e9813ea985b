#include "tessera/comm/slow_link/port_use.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "tessera/comm/traffic.h"

namespace tessera::comm {
namespace {

using std::chrono::nanoseconds;

/// Elements of the parts' sizes that go from one rank to another: equal parts, or those of a _v form.
std::uint64_t bytes_between(const OpDesc& call, const Route& route) {
  const std::size_t element = size_of(call.out.count > 0 ? call.out.dtype : call.in.dtype);
  const auto from = static_cast<std::size_t>(route.rank);
  const auto to = static_cast<std::size_t>(route.peer);
  const bool parts = !call.in_counts.empty() || !call.out_counts.empty();
  switch (call.kind) {
    case OpKind::all_gather:
      if (parts) return call.out_counts[from] * element;
      break;
    case OpKind::gather:
      if (parts) return route.peer == route.root ? call.out_counts[from] * element : 0;
      break;
    case OpKind::reduce_scatter:
      if (parts) return call.in_counts[to] * element;
      break;
    case OpKind::scatter:
      if (parts) return route.rank == route.root ? call.in_counts[to] * element : 0;
      break;
    default:
      break;
  }
  std::uint64_t count = std::max(call.in.count, call.out.count);
  if (call.kind == OpKind::gather && call.out.count == 0) count = call.in.count * static_cast<std::size_t>(route.ranks);
  if (call.kind == OpKind::scatter && call.in.count == 0)
    count = call.out.count * static_cast<std::size_t>(route.ranks);
  return direct_bytes_to(call.kind, count, element, route);
}

/// Messages in a row: an all_reduce reduces and then gathers.
int rounds_of(OpKind kind, int ranks) {
  if (kind == OpKind::barrier) return std::bit_width(static_cast<unsigned>(ranks - 1));
  return kind == OpKind::all_reduce ? 2 : 1;
}

class Uses {
 public:
  explicit Uses(const LinkedGroup& group) : group_(group), ranks_(static_cast<int>(group.members.size())) {}

  void add(const OpDesc& call) {
    const bool message = call.kind == OpKind::send || call.kind == OpKind::recv;
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == group_.rank || (message && peer != call.root)) continue;
      const std::size_t port = port_to(peer);
      farthest_ = std::max(farthest_, port);
      const std::uint64_t sent = call.kind == OpKind::send ? call.in.bytes() : to(call, group_.rank, peer);
      const std::uint64_t received = call.kind == OpKind::recv ? call.out.bytes() : to(call, peer, group_.rank);
      sent_[port] += static_cast<double>(sent);
      received_[port] += static_cast<double>(received);
      if (!message && (received > 0 || call.kind == OpKind::barrier)) senders_.push_back(peer);
    }
    rounds_ = std::max(rounds_, rounds_of(call.kind, ranks_));
  }

  PortUse result() const {
    PortUse use{.occupied = {}, .latency = link(farthest_).latency * rounds_, .senders = senders_};
    for (std::size_t port = 0; port < kPorts; ++port)
      use.occupied[port] =
          nanoseconds(std::llround(std::max(sent_[port], received_[port]) / link(port).bytes_per_second * 1e9));
    return use;
  }

 private:
  int host_of(int member) const {
    return group_.members[static_cast<std::size_t>(member)] / (group_.world_size / group_.links.hosts);
  }
  std::size_t port_to(int peer) const { return host_of(peer) == host_of(group_.rank) ? 0 : 1; }
  const SlowLink& link(std::size_t port) const {
    return port == 0 && group_.links.hosts > 1 ? group_.links.intra : group_.links.link;
  }
  /// Of a collective.
  std::uint64_t to(const OpDesc& call, int from, int peer) const {
    if (call.kind == OpKind::all_to_all && !call.in_counts.empty())
      return static_cast<std::uint64_t>(from == group_.rank ? call.in_counts[static_cast<std::size_t>(peer)]
                                                            : call.out_counts[static_cast<std::size_t>(from)]) *
             size_of(call.in.dtype);
    if (call.kind == OpKind::send || call.kind == OpKind::recv) return 0;
    return bytes_between(call, {.ranks = ranks_, .rank = from, .peer = peer, .root = call.root});
  }

  const LinkedGroup& group_;
  const int ranks_;
  std::array<double, kPorts> sent_{}, received_{};
  std::vector<int> senders_;
  std::size_t farthest_ = 0;
  int rounds_ = 0;
};

}  // namespace

PortUse port_use(const LinkedGroup& group, std::span<const OpDesc> calls) {
  Uses uses(group);
  for (const OpDesc& call : calls) uses.add(call);
  return uses.result();
}

}  // namespace tessera::comm
