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

class Uses {
 public:
  explicit Uses(const LinkedGroup& group) : group_(group), ranks_(static_cast<int>(group.members.size())) {}

  void add(const OpDesc& call) {
    const bool message = is_message(call.kind);
    const ReadPlan plan(call, group_.rank, ranks_);
    for (int peer = 0; peer < ranks_; ++peer) {
      if (peer == group_.rank || (message && peer != call.root)) continue;
      const std::size_t port = port_to(peer);
      farthest_ = std::max(farthest_, port);
      const std::uint64_t received = plan.bytes_from(peer);
      sent_[port] += static_cast<double>(plan.bytes_to(peer));
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
