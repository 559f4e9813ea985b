// Operations in flight that share links.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/base/task_graph.h"
#include "tessera/comm/sim/network.h"

namespace tessera::comm::sim {

/// Times operations on the links of a network. Deterministic. Used by one thread.
class TESSERA_API SharedLinks final : public base::TransferModel {
 public:
  /// `links`: bytes per second of each. Throws InvalidUsage unless all are above 0.
  SharedLinks(std::vector<double> links, LinkSharing sharing);

  /// Adds an operation; returns its number. Throws InvalidUsage for a link that does not exist.
  std::uint32_t add(OpCost cost);

  void reset() override;
  void start(std::uint32_t transfer, std::int64_t now) override;
  std::int64_t next_end() override;
  std::uint32_t finish(std::int64_t now) override;
  std::int64_t begun(std::uint32_t transfer) const override { return begun_.at(transfer); }

 private:
  /// An operation in flight: the bytes of one of its phases, or the latency that follows them.
  struct Flow {
    std::uint32_t transfer = 0;
    std::size_t phase = 0;
    bool sending = false;  // else its latency passes
    double left = 0;       // bytes of the phase
    double rate = 0;       // bytes per ns
    std::int64_t end = 0;  // of the bytes or the latency, as the rates are now
  };
  void enter_phase(Flow& flow, std::int64_t now);
  void queue_up(Flow& flow, std::int64_t now);
  void advance(std::int64_t now);
  void share();
  std::uint32_t tightest_link() const;
  void fix_rates(std::uint32_t tightest);
  const OpPhase& phase_of(const Flow& flow) const { return costs_[flow.transfer][flow.phase]; }

  const std::vector<double> links_;  // bytes per ns
  const LinkSharing sharing_;
  std::vector<OpCost> costs_;
  std::vector<std::int64_t> begun_;
  std::vector<std::int64_t> free_;  // in_order: when a link has sent all that was queued
  std::vector<Flow> flows_;
  std::int64_t now_ = 0;
  // Of share(), kept to avoid allocations: by link, what is left of it and the bytes of open flows for each of theirs.
  std::vector<double> spare_, weights_;
  std::vector<std::uint32_t> used_;  // links with flows
  std::vector<std::uint32_t> open_;  // flows without a rate
};

}  // namespace tessera::comm::sim
