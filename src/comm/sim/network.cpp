#include "tessera/comm/sim/network.h"

#include <string>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::comm::sim {
namespace {

using std::chrono::nanoseconds;

nanoseconds rounded(double seconds) {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(seconds));
}

/// Number of sequential messages in an operation's longest chain.
int rounds(OpKind kind) { return kind == OpKind::all_reduce ? 2 : 1; }

}  // namespace

Network fixed_times(std::function<nanoseconds(const SimulatedOp&)> time, bool in_order) {
  Network network;
  network.in_order = in_order;
  network.cost = [time = std::move(time)](const SimulatedOp& operation) {
    return OpCost{{.loads = {}, .bytes = 0, .latency = time(operation)}};
  };
  return network;
}

Network alpha_beta(nanoseconds latency, double bytes_per_second) {
  if (latency.count() < 0 || !(bytes_per_second > 0))
    throw InvalidUsage("network: latency " + std::to_string(latency.count()) + " ns and " +
                       std::to_string(bytes_per_second) +
                       " bytes a second; needs a latency of 0 or more and a rate above 0");
  return fixed_times([=](const SimulatedOp& operation) {
    return rounds(operation.kind) * latency + rounded(static_cast<double>(operation.bytes_sent) / bytes_per_second);
  });
}

Network measured(std::map<OpKind, CostTable> seconds) {
  return fixed_times([tables = std::move(seconds)](const SimulatedOp& operation) {
    const auto found = tables.find(operation.kind);
    if (found == tables.end())
      throw InvalidUsage("network: " + std::string(name_of(operation.kind)) + " has no measured cost");
    return rounded(found->second.at(static_cast<double>(operation.bytes)));
  });
}

}  // namespace tessera::comm::sim
