#include "tessera/plan/step_graph.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace tessera::plan {
namespace {

constexpr std::uint32_t kNoChain = UINT32_MAX;
constexpr std::size_t kMaxChains = 64;  // bounds the memory; nodes of further chains stay as dependencies

/// Adds nodes in order and knows which of them follow from which. The nodes are divided into chains, in which each node
/// waits for the one before, so that one number per chain says which nodes precede a node.
class NodeOrder {
 public:
  /// Sorts `nodes` and removes repeated ones and those that precede another one.
  void reduce(std::vector<std::uint32_t>& nodes) const {
    std::ranges::sort(nodes, std::greater<>());
    nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
    std::vector<std::uint32_t> kept;
    for (const std::uint32_t node : nodes)
      if (std::ranges::none_of(kept, [&](std::uint32_t later) { return precedes(node, later); })) kept.push_back(node);
    nodes.assign(kept.rbegin(), kept.rend());
  }

  /// The next node. Chains consist of work only or of operations only.
  void add(const std::vector<std::uint32_t>& after, bool operation) {
    const auto node = static_cast<std::uint32_t>(places_.size());
    std::vector<std::uint32_t> reached;
    for (const std::uint32_t earlier : after) {
      const std::vector<std::uint32_t>& more = reached_[earlier];
      if (reached.size() < more.size()) reached.resize(more.size(), 0);
      for (std::size_t i = 0; i < more.size(); ++i) reached[i] = std::max(reached[i], more[i]);
    }
    const Place place = next_place(after, operation);
    if (place.chain != kNoChain) {
      chains_[place.chain] = {node, place.position, operation};
      if (reached.size() <= place.chain) reached.resize(place.chain + 1, 0);
      reached[place.chain] = place.position;
    }
    places_.push_back(place);
    reached_.push_back(std::move(reached));
  }

 private:
  struct Place {
    std::uint32_t chain = kNoChain;
    std::uint32_t position = 0;  // from 1
  };
  struct Chain {
    std::uint32_t last = 0;  // node
    std::uint32_t length = 0;
    bool operations = false;
  };

  Place next_place(const std::vector<std::uint32_t>& after, bool operation) {
    for (const std::uint32_t earlier : after) {
      const std::uint32_t chain = places_[earlier].chain;
      if (chain != kNoChain && chains_[chain].last == earlier && chains_[chain].operations == operation)
        return {chain, chains_[chain].length + 1};
    }
    if (chains_.size() == kMaxChains) return {};
    chains_.emplace_back();
    return {static_cast<std::uint32_t>(chains_.size() - 1), 1};
  }
  bool precedes(std::uint32_t node, std::uint32_t later) const {
    const Place& place = places_[node];
    return place.chain < reached_[later].size() && reached_[later][place.chain] >= place.position;
  }

  std::vector<Chain> chains_;
  std::vector<Place> places_;                        // by node
  std::vector<std::vector<std::uint32_t>> reached_;  // by node and chain: positions up to this one precede it
};

}  // namespace

StepGraph step_graph(const VirtualClock& clock, const StepTasks& tasks, std::span<const TransferRecord> transfers,
                     const KernelSimulator& kernels) {
  const TaskGraph& graph = clock.graph();
  const std::int64_t origin = clock.times_of(tasks.origin).end_ns;
  StepGraph nodes;
  NodeOrder order;
  std::vector<std::vector<std::uint32_t>> nodes_of(tasks.end - tasks.first);  // by task: what is done when it is done
  for (TaskId id = tasks.first; id < tasks.end; ++id) {
    const TaskGraph::Task& task = graph.tasks()[id];
    std::vector<std::uint32_t> after;
    for (const TaskId earlier : graph.dependencies(task)) {
      if (earlier < tasks.first) continue;
      const std::vector<std::uint32_t>& waited = nodes_of[earlier - tasks.first];
      after.insert(after.end(), waited.begin(), waited.end());
    }
    order.reduce(after);
    const bool operation = task.transfer != TaskGraph::kNoTransfer;
    if (!operation && task.duration_ns == 0 && task.label.empty()) {
      nodes_of[id - tasks.first] = std::move(after);
      continue;
    }
    order.add(after, operation);
    const TaskGraph::Times times = clock.times_of(id);
    nodes_of[id - tasks.first] = {static_cast<std::uint32_t>(nodes.size())};
    StepNode& node = nodes.emplace_back();
    node.label = task.label;
    node.start_ns = std::max(times.begin_ns, origin) - origin;
    node.duration_ns = std::max(times.end_ns, origin) - origin - node.start_ns;
    node.after = std::move(after);
    if (operation) node.operation = transfers[task.transfer].operation;
    if (const auto call = kernels.calls().find(id); call != kernels.calls().end()) node.kernel = call->second;
    node.task = id;
  }
  return nodes;
}

}  // namespace tessera::plan
