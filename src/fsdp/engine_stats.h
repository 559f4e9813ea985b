// What an engine's units are, and what its operations have sent.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/comm/traffic.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/formulas.h"
#include "tessera/fsdp/strategy.h"

namespace tessera::fsdp {

struct EngineCore;

/// Calls and bytes sent by one rank, by kind; `control` holds norms and votes. Cumulative.
struct TESSERA_API EngineTraffic {
  comm::TrafficStats::TrafficCount all_gather,  ///< all-gathers of parameters
      reduce_scatter,                           ///< reductions to shards
      all_reduce,                               ///< reductions to full gradients, or of parameter deltas
      control;                                  ///< norms and votes
  comm::TrafficStats::TrafficCount broadcast;   ///< module buffers; with BufferSync::maximum their all_reduces
  /// The traffic between two calls of EngineStats::traffic(), the later one on the left.
  EngineTraffic operator-(const EngineTraffic& earlier) const;
};

/// A unit's share of the model, for reports.
struct UnitStats {
  std::string name;                 ///< name as in UnitSpec
  std::int64_t elements = 0;        ///< elements of the parameters
  std::int64_t padding = 0;         ///< alignment between parameters and at the end
  bool kept_after_forward = false;  ///< stays unsharded between forward and backward
  bool is_root = false;             ///< UnitSpec::is_root
  Strategy strategy;                ///< strategy applied to this unit
  std::size_t peak_bytes = 0;       ///< most bytes of its leases so far: unsharded parameters and gradients
};

/// The statistics of one engine and rank: Engine::stats(). Counters are cumulative since the engine was created. Used
/// by the engine's thread; nothing here waits or is collective.
class TESSERA_API EngineStats {
 public:
  EngineStats(const EngineStats&) = delete;
  EngineStats& operator=(const EngineStats&) = delete;

  std::vector<UnitStats> units() const;      ///< units in forward order
  std::vector<UnitSize> unit_sizes() const;  ///< input of the formulas, in forward order
  EngineTraffic traffic() const;             ///< traffic of this rank
  /// Bytes that this engine's norms and order checks send per step, at most over ranks.
  std::uint64_t control_formula_bytes() const;
  /// Bytes that this rank sends per step, in one call, where buffers are synchronized (EngineTraffic::broadcast).
  std::uint64_t buffer_formula_bytes() const;
  std::uint64_t copied_bytes() const;  ///< between buffers in device memory, in bytes
  OffloadBytes offload_bytes() const;  ///< between this rank's device and its shards in host memory
  /// Counters of this rank for all_gather, reduce_scatter or all_reduce. Throws InvalidUsage for other operations.
  CollectiveStats collective_stats(comm::OpKind collective) const;

 private:
  friend class Engine;
  explicit EngineStats(const EngineCore& core) : core_(core) {}
  const EngineCore& core_;
};

}  // namespace tessera::fsdp
