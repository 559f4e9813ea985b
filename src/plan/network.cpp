#include "tessera/plan/network.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::plan {
namespace {

using std::chrono::nanoseconds;

constexpr double kNanoseconds = 1e9;  // of a second

nanoseconds rounded(double seconds) { return nanoseconds(later(0, std::trunc(seconds * kNanoseconds))); }

/// Number of sequential messages in an operation's longest chain.
int rounds(comm::OpKind kind) { return kind == comm::OpKind::all_reduce ? 2 : 1; }

std::vector<double> per_nanosecond(std::vector<double> links) {
  for (double& link : links) {
    if (!(link > 0))
      throw base::InvalidUsage("network: a link of " + std::to_string(link) + " bytes a second, needs more");
    link /= kNanoseconds;
  }
  return links;
}

}  // namespace

Network fixed_times(std::function<nanoseconds(const SimulatedOp&)> time, bool in_order) {
  Network network;
  network.in_order = in_order;
  network.cost = [time = std::move(time)](const SimulatedOp& operation) {
    return OpCost{{.latency = time(operation)}};
  };
  return network;
}

Network alpha_beta(nanoseconds latency, double bytes_per_second) {
  if (latency.count() < 0 || !(bytes_per_second > 0))
    throw base::InvalidUsage("network: latency " + std::to_string(latency.count()) + " ns and " +
                             std::to_string(bytes_per_second) +
                             " bytes a second; needs a latency of 0 or more and a rate above 0");
  return fixed_times([=](const SimulatedOp& operation) {
    return rounds(operation.kind) * latency + rounded(static_cast<double>(operation.bytes_sent) / bytes_per_second);
  });
}

Network measured(std::map<comm::OpKind, CostTable> seconds) {
  return fixed_times([tables = std::move(seconds)](const SimulatedOp& operation) {
    const auto found = tables.find(operation.kind);
    if (found == tables.end())
      throw base::InvalidUsage("network: " + std::string(name_of(operation.kind)) + " has no measured cost");
    return rounded(found->second.at(static_cast<double>(operation.bytes)));
  });
}

SharedLinks::SharedLinks(std::vector<double> links, LinkSharing sharing)
    : links_(per_nanosecond(std::move(links))), sharing_(sharing) {}

std::uint32_t SharedLinks::add(OpCost cost) {
  for (const OpPhase& phase : cost)
    for (const LinkLoad& load : phase.loads)
      if (load.link >= links_.size())
        throw base::InvalidUsage("network: link " + std::to_string(load.link) + " of " + std::to_string(links_.size()));
  for (OpPhase& phase : cost) std::erase_if(phase.loads, [](const LinkLoad& load) { return !(load.bytes > 0); });
  if (cost.empty()) cost.emplace_back();
  costs_.push_back(std::move(cost));
  return static_cast<std::uint32_t>(costs_.size() - 1);
}

void SharedLinks::reset() {
  begun_.assign(costs_.size(), 0);
  free_.assign(links_.size(), 0);
  flows_.clear();
  now_ = 0;
}

void SharedLinks::start(std::uint32_t transfer, std::int64_t now) {
  advance(now);
  Flow flow{.transfer = transfer};
  begun_.at(transfer) = now;
  enter_phase(flow, now);
  flows_.push_back(flow);
  share();
}

void SharedLinks::enter_phase(Flow& flow, std::int64_t now) {
  const OpPhase& phase = phase_of(flow);
  flow.sending = !phase.loads.empty() && phase.bytes > 0;
  if (!flow.sending)
    flow.end = now + phase.latency.count();
  else if (sharing_ == LinkSharing::in_order)
    queue_up(flow, now);
  else
    flow.left = phase.bytes;
}

/// The bytes pass each link behind those queued there; the phase's bytes are through when they have passed all links.
void SharedLinks::queue_up(Flow& flow, std::int64_t now) {
  std::int64_t begun = INT64_MAX;
  flow.end = now;
  for (const LinkLoad& load : phase_of(flow).loads) {
    const std::int64_t begin = std::max(now, free_[load.link]);
    free_[load.link] = later(begin, load.bytes / links_[load.link]);
    flow.end = std::max(flow.end, free_[load.link]);
    begun = std::min(begun, begin);
  }
  if (flow.phase == 0) begun_[flow.transfer] = begun;
}

void SharedLinks::advance(std::int64_t now) {
  if (sharing_ == LinkSharing::fair)
    for (Flow& flow : flows_)
      if (flow.sending) flow.left -= flow.rate * static_cast<double>(now - now_);
  now_ = now;
}

/// Max-min fair rates: the link with the least rate for each of its flows determines theirs, and so on with the others.
void SharedLinks::share() {
  if (sharing_ != LinkSharing::fair) return;
  spare_.resize(links_.size());
  weights_.resize(links_.size());
  open_.clear();
  used_.clear();
  for (std::uint32_t i = 0; i < flows_.size(); ++i)
    if (flows_[i].sending) open_.push_back(i);
  for (const std::uint32_t i : open_)
    for (const LinkLoad& load : phase_of(flows_[i]).loads) weights_[load.link] = 0;
  for (const std::uint32_t i : open_)
    for (const LinkLoad& load : phase_of(flows_[i]).loads) {
      if (weights_[load.link] == 0) {
        used_.push_back(load.link);
        spare_[load.link] = links_[load.link];
      }
      weights_[load.link] += load.bytes / phase_of(flows_[i]).bytes;
    }
  while (!open_.empty()) fix_rates(tightest_link());
  for (Flow& flow : flows_)
    if (flow.sending) flow.end = flow.rate > 0 ? later(now_, std::max(0.0, flow.left / flow.rate)) : now_;
}

std::uint32_t SharedLinks::tightest_link() const {
  const auto rate = [this](std::uint32_t link) {
    return weights_[link] <= 0 ? std::numeric_limits<double>::infinity() : std::max(spare_[link], 0.0) / weights_[link];
  };
  return *std::ranges::min_element(used_, {}, rate);
}

/// Fixes the rates of the flows over this link.
void SharedLinks::fix_rates(std::uint32_t tightest) {
  const double rate = std::max(spare_[tightest], 0.0) / weights_[tightest];
  std::erase_if(open_, [&](std::uint32_t i) {
    Flow& flow = flows_[i];
    const OpPhase& phase = phase_of(flow);
    if (std::ranges::find(phase.loads, tightest, &LinkLoad::link) == phase.loads.end()) return false;
    flow.rate = rate;
    for (const LinkLoad& load : phase.loads) {
      spare_[load.link] -= rate * load.bytes / phase.bytes;
      weights_[load.link] -= load.bytes / phase.bytes;
    }
    return true;
  });
  weights_[tightest] = 0;
}

std::int64_t SharedLinks::next_end() {
  std::int64_t end = INT64_MAX;
  for (const Flow& flow : flows_) end = std::min(end, flow.end);
  return end;
}

std::uint32_t SharedLinks::finish(std::int64_t now) {
  advance(now);
  const auto due = std::ranges::find_if(flows_, [now](const Flow& flow) { return flow.end <= now; });
  const std::uint32_t transfer = due->transfer;
  const bool sent = due->sending;
  if (sent) {
    due->sending = false;
    due->end = now + phase_of(*due).latency.count();
  } else if (due->phase + 1 < costs_[transfer].size()) {
    ++due->phase;
    enter_phase(*due, now);
  } else {
    flows_.erase(due);
    share();
    return transfer;
  }
  share();
  return TaskGraph::kNoTransfer;
}

}  // namespace tessera::plan
