// Runs the schedules of all ranks of a collective on simulated links, message by message: the independent result that
// the cost model's closed formulas are held against.
#pragma once

#include <array>
#include <chrono>
#include <deque>
#include <map>
#include <string_view>
#include <tuple>
#include <vector>

#include "tessera/comm/schedule.h"
#include "tessera/plan/network.h"

namespace tessera::plan {

/// A port for each rank, which its messages leave one after the other, and a latency for each message.
struct PortNetwork {
  double bytes_per_second = 1e9;
  /// Seconds from one rank to another.
  std::function<double(int, int)> latency;
};

class ScheduleRun {
 public:
  ScheduleRun(const comm::CollectiveSpec& spec, std::string_view algorithm, const PortNetwork& network)
      : network_(network),
        links_(std::vector<double>(static_cast<std::size_t>(spec.ranks), network.bytes_per_second),
               LinkSharing::in_order) {
    for (int rank = 0; rank < spec.ranks; ++rank) {
      comm::CollectiveSpec mine = spec;
      mine.rank = rank;
      schedules_.push_back(comm::build_schedule(mine, algorithm));
    }
  }

  std::chrono::nanoseconds time() {
    for (int rank = 0; rank < static_cast<int>(schedules_.size()); ++rank) {
      const comm::Schedule& schedule = schedules_[static_cast<std::size_t>(rank)];
      open_.emplace_back();
      after_.emplace_back(schedule.steps.size());
      for (std::uint32_t i = 0; i < schedule.steps.size(); ++i) {
        open_.back().push_back(schedule.steps[i].waits_for);
        if (schedule.steps[i].waits_for == 0) ready_.emplace_back(rank, i);
      }
    }
    while (!ready_.empty()) {
      const auto [rank, step] = ready_.front();
      ready_.pop_front();
      add(rank, step);
    }
    std::int64_t last = 0;
    for (const TaskGraph::Times& times : graph_.solve(&links_)) last = std::max(last, times.end_ns);
    return std::chrono::nanoseconds(last);
  }

 private:
  using Channel = std::tuple<int, int, std::uint32_t>;  // from, to, number

  void add(int rank, std::uint32_t index) {
    const comm::ScheduleStep& step = schedules_[static_cast<std::size_t>(rank)].steps[index];
    std::vector<TaskId>& after = after_[static_cast<std::size_t>(rank)][index];
    if (after.empty()) after.push_back(0);
    if (step.kind == comm::ScheduleStep::Kind::send) {
      const double latency = network_.latency(rank, step.peer);
      OpCost cost{{.loads = {{static_cast<std::uint32_t>(rank), static_cast<double>(step.from.bytes)}},
                   .bytes = static_cast<double>(step.from.bytes),
                   .latency = std::chrono::nanoseconds(static_cast<std::int64_t>(latency * 1e9))}};
      const TaskId sent = graph_.add_transfer(links_.add(std::move(cost)), after);
      const Channel channel{rank, step.peer, step.number};
      sent_[channel] = sent;
      const auto waiting = waiting_.find(channel);
      if (waiting != waiting_.end()) receive(step.peer, waiting->second, sent);
      done(rank, index, sent);
    } else if (step.kind == comm::ScheduleStep::Kind::receive) {
      const Channel channel{step.peer, rank, step.number};
      const auto sent = sent_.find(channel);
      if (sent == sent_.end())
        waiting_[channel] = index;
      else
        receive(rank, index, sent->second);
    } else {
      done(rank, index, graph_.add_work(0, after));
    }
  }
  void receive(int rank, std::uint32_t index, TaskId sent) {
    std::vector<TaskId> after = after_[static_cast<std::size_t>(rank)][index];
    after.push_back(sent);
    done(rank, index, graph_.add_work(0, after));
  }
  void done(int rank, std::uint32_t index, TaskId task) {
    const comm::Schedule& schedule = schedules_[static_cast<std::size_t>(rank)];
    const comm::ScheduleStep& step = schedule.steps[index];
    for (std::uint32_t i = step.first_dependent; i < step.first_dependent + step.dependents; ++i) {
      const std::uint32_t next = schedule.dependents[i];
      after_[static_cast<std::size_t>(rank)][next].push_back(task);
      if (--open_[static_cast<std::size_t>(rank)][next] == 0) ready_.emplace_back(rank, next);
    }
  }

  const PortNetwork network_;
  SharedLinks links_;
  std::vector<comm::Schedule> schedules_;
  TaskGraph graph_;
  std::vector<std::vector<std::uint32_t>> open_;         // by rank and step: what it still waits for
  std::vector<std::vector<std::vector<TaskId>>> after_;  // by rank and step
  std::deque<std::pair<int, std::uint32_t>> ready_;
  std::map<Channel, TaskId> sent_;
  std::map<Channel, std::uint32_t> waiting_;
};

}  // namespace tessera::plan
