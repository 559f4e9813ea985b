// The network of a simulation: what an operation costs, which links it shares, and when those in flight end.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "tessera/base/export.h"
#include "tessera/comm/types.h"
#include "tessera/plan/cost_table.h"
#include "tessera/plan/task_graph.h"

namespace tessera::plan {

/// The ranks of a communicator, as ranks of the world: first, first + stride, ...
struct RankSet {
  int first = 0;   ///< the lowest one
  int stride = 1;  ///< between two neighbors
  int ranks = 1;   ///< how many there are
  /// The rank of the world that is member `i`.
  std::size_t member(int i) const noexcept {
    const int rank = first + i * stride;
    return static_cast<std::size_t>(rank);
  }
  bool operator==(const RankSet&) const = default;  ///< compares all members
};

/// One operation, as passed to a cost model.
struct SimulatedOp {
  comm::OpKind kind = comm::OpKind::barrier;  ///< the operation
  std::uint64_t bytes = 0;                    ///< bytes of the larger buffer; summed over the operations of a batch
  std::uint64_t bytes_sent = 0;               ///< bytes sent by this rank: comm::direct_bytes_sent
  int ranks = 1;                              ///< ranks of the communicator
  RankSet members;                            ///< the same ranks, by their places in the world
};

/// Bytes of an operation that pass a link.
struct LinkLoad {
  std::uint32_t link = 0;  ///< index in Network::links
  double bytes = 0;        ///< bytes of all ranks that share the link
};

/// A part of an operation: its bytes pass all its links at once, and the latency follows.
struct OpPhase {
  std::vector<LinkLoad> loads;          ///< loads of each link that it passes
  double bytes = 0;                     ///< bytes of one rank: phases that share a link get equal rates of these bytes
  std::chrono::nanoseconds latency{0};  ///< after the last byte
};

/// An operation's parts, one after the other.
using OpCost = std::vector<OpPhase>;

/// How operations share a link.
enum class LinkSharing : std::uint8_t {
  fair,      ///< operations in flight divide its bandwidth: max-min fair rates
  in_order,  ///< the bytes of one operation follow those of the other, in the order of the calls
};

/// What a communicator needs on each of its ranks: memory of category `communication`.
struct CommunicatorMemory {
  std::uint64_t bytes = 0;  ///< bytes while it exists
  /// Further bytes once it has reduced memory that it did not allocate: an all_reduce of at most 1 KiB, as of norms and
  /// losses. Gradients are in memory of the communicator.
  std::uint64_t ordinary_bytes = 0;
};

/// A cost model. A value.
struct Network {
  std::function<OpCost(const SimulatedOp&)> cost;  ///< not called for communicators of one rank
  /// The time that a call takes from its rank's computation, while the operation proceeds. Empty: none. Not called for
  /// communicators of one rank.
  std::function<std::chrono::nanoseconds(const SimulatedOp&)> busy;
  std::vector<double> links;                ///< bytes per second of each, in one direction
  LinkSharing sharing = LinkSharing::fair;  ///< sharing by operations in flight
  /// True: an operation of a communicator starts when the previous one is done. False: each starts when it is called.
  bool in_order = true;
  std::map<int, CommunicatorMemory> memory;  ///< memory by the communicator's ranks; others need none
};

/// Every operation takes the time that `time` returns and shares no link. For `in_order`, see Network.
TESSERA_API Network fixed_times(std::function<std::chrono::nanoseconds(const SimulatedOp&)> time, bool in_order = true);

/// Every rank has a link of `bytes_per_second` in each direction, and `latency` applies between any two ranks: a
/// collective takes the time of its longest chain of messages plus that of the bytes its rank sends (Hockney's model;
/// the direct algorithms: one message per peer, all concurrent, all_reduce in two rounds). Operations of different
/// communicators do not share links.
TESSERA_API Network alpha_beta(std::chrono::nanoseconds latency, double bytes_per_second);

/// Measured times, by operation and bytes of the larger buffer, for the number of ranks of the measurement. A query for
/// an operation that was not measured throws InvalidUsage. Operations share no link.
TESSERA_API Network measured(std::map<comm::OpKind, CostTable> seconds);

/// Times operations on the links of a network. Deterministic. Used by one thread.
class TESSERA_API SharedLinks final : public TransferModel {
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
    std::int64_t end = 0;  // end of the bytes or the latency, as the rates are now
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
  std::vector<std::int64_t> free_;  // time at which a link has sent all that was queued, for in_order
  std::vector<Flow> flows_;
  std::int64_t now_ = 0;
  // Buffers of share(), kept to avoid allocations: by link, what is left of it and the bytes of open flows for each of
  // theirs.
  std::vector<double> spare_, weights_;
  std::vector<std::uint32_t> used_;  // links with flows
  std::vector<std::uint32_t> open_;  // flows without a rate
};

}  // namespace tessera::plan
