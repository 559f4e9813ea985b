// A simulated step without its times: what a rank computes, calls and waits for, in an order that no link and no batch
// changes. So it can be timed again over other links and for other batches, which the pages do.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/plan/network.h"
#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// A figure for a microbatch of the fewest and of the most sequences. It grows in proportion to the sequences between.
using Growth = std::array<std::int64_t, 2>;

struct StepAction {
  enum class Kind : std::uint8_t {
    compute,       ///< StepSchedule::works[index]
    call,          ///< StepSchedule::operations[index]
    wait,          ///< for the operation that was called as number `index`; counts as exposed
    wait_unshown,  ///< likewise, without being counted: of norms, for example
  };
  Kind kind = Kind::compute;
  std::uint32_t index = 0;
};

struct StepSchedule {
  std::vector<StepAction> actions;  ///< of the step before, and of the step
  std::uint32_t first = 0;          ///< action of the step: before it, all that was called may be in flight
  std::vector<Growth> works;        ///< nanoseconds
  std::vector<plan::SimulatedOp> operations;
  Growth work_in_waits{};      ///< nanoseconds that count as exposed, such as decoding
  std::vector<Growth> memory;  ///< live bytes at the instants that can be the peak
};

/// From the same continuous step with the fewest and with the most sequences, planned with their graphs for a machine
/// that does one thing at a time, over one link without latency that is so slow that waits take time. Nothing if their
/// orders differ.
std::optional<StepSchedule> schedule_of(const StepPlan& fewest, const StepPlan& most);

/// Whether the memory of a step between the two is, at every instant, what StepSchedule::memory says: `part` of the way
/// from the fewest to the most sequences.
bool grows_evenly(const StepPlan& fewest, const StepPlan& between, const StepPlan& most, double part);

/// What an operation needs of the ports of its rank: inside its host, and to other hosts.
struct PortLoad {
  std::array<double, 2> bytes{};  ///< that pass each
  std::array<int, 2> messages{};  ///< in a row, whose latencies follow
  bool operator==(const PortLoad&) const = default;
};

/// Nothing if the operation passes the ports in several rounds. `hosts` divides `ranks`.
std::optional<PortLoad> port_load(const plan::SimulatedOp& operation, int ranks, int hosts);

}  // namespace tessera::tools
