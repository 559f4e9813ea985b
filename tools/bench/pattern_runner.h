// One rank's part of `tessera bench --pattern`: times the groups of a pattern.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tools/bench/buffers.h"
#include "tools/bench/pattern.h"
#include "tools/bench/runner.h"

namespace tessera::tools {

class PatternRunner {
 public:
  struct Ranks {
    comm::HostCollectives& control;
    comm::Communicator& measured;  ///< the same ranks
    BenchMemory& memory;
  };

  /// All arguments outlive it. `environment`: see gather_environment(); it tells the hosts of the ranks.
  PatternRunner(const BenchSpec& plan, const Ranks& ranks, const nlohmann::ordered_json& environment);

  /// Collective: an element of "patterns" in the JSON that --json writes. If something is slow, the pattern is measured
  /// again, and the faster time of each group counts.
  nlohmann::ordered_json run(const BenchOp& op, std::uint64_t bytes);

 private:
  /// What this rank does in a round.
  struct Part {
    const PatternGroup* group = nullptr;  ///< null: it waits for the others
    int rank = 0;                         ///< in the group
    BenchShape shape;
    BenchCall call;
    std::unique_ptr<comm::Communicator> communicator;  ///< of operations other than sends
  };
  using Times = std::vector<std::vector<double>>;  ///< microseconds by round and rank, 0 for one that waits

  bool sends() const { return plan_.pattern->sends; }
  BenchShape shape_of(const BenchOp& op, std::size_t ranks, int rank = 0) const;
  Part part_of(const BenchOp& op, const std::vector<PatternGroup>& round);
  comm::Work start(const Part& part) const;
  std::vector<double> time_round(const BenchOp& op, const std::vector<PatternGroup>& round);
  double time_of(const std::vector<double>& times, const PatternGroup& group) const;
  double gbps(const BenchOp& op, double us, std::size_t ranks) const;
  std::vector<UnitRate> rates_of(const BenchOp& op, const Times& times) const;
  nlohmann::ordered_json rounds_json(const BenchOp& op, const Times& times) const;
  nlohmann::ordered_json units_json() const;

  const BenchSpec& plan_;
  comm::HostCollectives& control_;
  comm::Communicator& measured_;
  BenchMemory& memory_;
  const nlohmann::ordered_json& environment_;
  bool hosts_ = false;  ///< the units are hosts
  PatternUnits units_;
  std::vector<std::vector<PatternGroup>> rounds_;
  std::uint64_t bytes_ = 0;
  std::uint64_t wrong_ = 0;
};

}  // namespace tessera::tools
