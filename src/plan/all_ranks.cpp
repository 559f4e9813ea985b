#include "tessera/plan/all_ranks.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/plan/network.h"

namespace tessera::plan {

TaskGraph without_chains(const TaskGraph& graph, std::span<TaskId> kept) {
  const std::vector<TaskGraph::Task>& tasks = graph.tasks();
  std::vector<std::uint32_t> dependents(tasks.size(), 0);
  for (const TaskGraph::Task& task : tasks)
    for (const TaskId earlier : graph.dependencies(task)) ++dependents[earlier];
  std::vector<char> needed(tasks.size(), 0);  // by others than the next task of its chain
  for (const TaskId task : kept) needed[task] = 1;
  TaskGraph merged;
  std::vector<TaskId> number(tasks.size(), 0);
  std::vector<std::int64_t> pending(tasks.size(), 0);  // work of a chain that no task of `merged` has yet
  for (TaskId id = 1; id < tasks.size(); ++id) {
    const TaskGraph::Task& task = tasks[id];
    const auto all = graph.dependencies(task);
    std::vector<TaskId> after;
    std::int64_t duration = task.duration_ns;
    for (const TaskId earlier : all) after.push_back(number[earlier]);
    if (all.size() == 1) duration += pending[all[0]];
    const bool work = task.transfer == TaskGraph::kNoTransfer;
    const auto next = id + 1;
    const bool chain = work && all.size() == 1 && !needed[id] && dependents[id] == 1 && next < tasks.size() &&
                       tasks[next].transfer == TaskGraph::kNoTransfer && tasks[next].dependencies == 1 &&
                       graph.dependencies(tasks[next])[0] == id;
    if (chain) {  // the next task takes this one's work over
      number[id] = after[0];
      pending[id] = duration;
      continue;
    }
    number[id] =
        work ? merged.add_work(duration, after, task.label) : merged.add_transfer(task.transfer, after, task.label);
  }
  for (TaskId& task : kept) task = number[task];
  return merged;
}

namespace {

double checked_factor(double factor, const std::string& whose) {
  if (!(factor >= 0.01))
    throw base::InvalidUsage(whose + ": a factor of " + std::to_string(factor) + "; needs 0.01 or more");
  return factor;
}

class AllRanks {
 public:
  AllRanks(const Topology& topology, int ranks, const Variation& variation)
      : topology_(topology), ranks_(ranks), variation_(variation), speed_(static_cast<std::size_t>(ranks), 1.0) {
    for (const auto& [rank, factor] : variation.slow_ranks) {
      if (rank < 0 || rank >= ranks)
        throw base::InvalidUsage("slow rank " + std::to_string(rank) + ": there are " + std::to_string(ranks) +
                                 " ranks");
      speed_[static_cast<std::size_t>(rank)] = checked_factor(factor, "slow rank " + std::to_string(rank));
    }
    add_links();
  }

  RankTimes run(const TaskGraph& graph, std::span<const TransferRecord> transfers, std::span<const TaskId> marks) {
    SharedLinks links(capacity_, topology_.sharing);
    const Network network = cluster(topology_, ranks_);
    TaskGraph all;
    const auto ranks = static_cast<std::size_t>(ranks_);
    std::vector<std::vector<TaskId>> of(graph.tasks().size(), std::vector<TaskId>(ranks, 0));
    std::vector<TaskId> after;
    for (TaskId id = 1; id < of.size(); ++id) {
      const TaskGraph::Task& task = graph.tasks()[id];
      if (task.transfer == TaskGraph::kNoTransfer) {
        for (std::size_t rank = 0; rank < ranks; ++rank) {
          after.clear();
          for (const TaskId earlier : graph.dependencies(task)) after.push_back(of[earlier][rank]);
          of[id][rank] = all.add_work(duration(task.duration_ns, rank), after);
        }
        continue;
      }
      const SimulatedOp& operation = transfers[task.transfer].operation;
      const OpCost cost = network.cost(operation);
      for_each_group(operation.members, [&](const RankSet& group) {
        after.clear();
        for (int i = 0; i < group.ranks; ++i)
          for (const TaskId earlier : graph.dependencies(task)) after.push_back(of[earlier][group.member(i)]);
        std::ranges::sort(after);
        after.erase(std::unique(after.begin(), after.end()), after.end());
        const TaskId joined = all.add_transfer(links.add(cost_of(group, operation.members, cost)), after);
        for (int i = 0; i < group.ranks; ++i) of[id][group.member(i)] = joined;
      });
    }
    const std::vector<TaskGraph::Times> times = all.solve(&links);
    RankTimes result(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank)
      for (const TaskId mark : marks) result[rank].push_back(times[of.at(mark)[rank]].end_ns);
    return result;
  }

 private:
  /// A port of each rank, then the links out of the domains, level by level.
  void add_links() {
    capacity_.assign(static_cast<std::size_t>(ranks_), topology_.bytes_per_second);
    for (std::size_t level = 0; level < topology_.domains.size(); ++level) {
      const LinkDomain& domain = topology_.domains[level];
      first_link_.push_back(static_cast<std::uint32_t>(capacity_.size()));
      capacity_.insert(capacity_.end(), static_cast<std::size_t>((ranks_ + domain.ranks - 1) / domain.ranks),
                       domain.bytes_per_second);
    }
    for (const auto& [host, factor] : variation_.slow_hosts) {
      if (topology_.domains.empty())
        throw base::InvalidUsage("slow link of host " + std::to_string(host) +
                                 ": all ranks are on one host, without links to others; give several hosts");
      const int hosts = (ranks_ - 1) / topology_.domains[0].ranks + 1;
      if (host < 0 || host >= hosts)
        throw base::InvalidUsage("slow link of host " + std::to_string(host) + ": there are " + std::to_string(hosts) +
                                 " hosts with links between them");
      capacity_[first_link_[0] + static_cast<std::uint32_t>(host)] /=
          checked_factor(factor, "slow link of host " + std::to_string(host));
    }
  }

  /// The communicators that divide the world as `members` does.
  template <class Body>
  void for_each_group(const RankSet& members, const Body& body) const {
    const int block = members.stride * members.ranks;
    for (int start = 0; start + block <= ranks_; start += block)
      for (int i = 0; i < members.stride; ++i) body(RankSet{start + i, members.stride, members.ranks});
  }

  /// The cost of one communicator's operation on the links of its own members. `cost` is that of `like`, with the bytes
  /// of all communicators that share a link.
  OpCost cost_of(const RankSet& group, const RankSet& like, const OpCost& cost) const {
    const Placement place(topology_, ranks_, like);
    OpCost own = cost;
    for (OpPhase& phase : own) {
      std::vector<LinkLoad> loads;
      for (const LinkLoad& load : phase.loads) {
        const auto level = static_cast<int>(load.link);
        std::uint32_t last = UINT32_MAX;
        for (int i = 0; i < group.ranks; ++i) {
          const int rank = group.first + i * group.stride;
          const std::uint32_t link =
              level == 0
                  ? static_cast<std::uint32_t>(
                        topology_.domains.empty()
                            ? group.first
                            : std::max(group.first, rank / topology_.domains[0].ranks * topology_.domains[0].ranks))
                  : first_link_[static_cast<std::size_t>(level - 1)] +
                        static_cast<std::uint32_t>(rank / topology_.domains[static_cast<std::size_t>(level - 1)].ranks);
          if (link == last) continue;  // members of a domain follow each other
          last = link;
          loads.push_back({link, load.bytes / place.communicators(level)});
        }
      }
      phase.loads = std::move(loads);
    }
    return own;
  }

  std::int64_t duration(std::int64_t ns, std::size_t rank) {
    double factor = speed_[rank];
    if (variation_.jitter > 0 && ns > 0) factor *= 1 + variation_.jitter * std::abs(normal_(random_));
    return later(0, static_cast<double>(ns) * factor);
  }

  const Topology& topology_;
  const int ranks_;
  const Variation& variation_;
  std::vector<double> speed_;     // by rank
  std::vector<double> capacity_;  // of the links
  std::vector<std::uint32_t> first_link_;
  std::mt19937_64 random_{variation_.seed};
  std::normal_distribution<double> normal_;
};

}  // namespace

RankTimes simulate_all_ranks(const TaskGraph& graph, std::span<const TransferRecord> transfers,
                             const Topology& topology, int ranks, const Variation& variation,
                             std::span<const TaskId> marks) {
  std::vector<TaskId> kept(marks.begin(), marks.end());
  const TaskGraph shorter = without_chains(graph, kept);
  return AllRanks(topology, ranks, variation).run(shorter, transfers, kept);
}

}  // namespace tessera::plan
