// The calls that a training step makes, timed in their order: one rank's part of `bench --of-step`.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/plan/world.h"
#include "tools/bench/operations.h"

namespace tessera::tools {

/// One call of the step.
struct StepCall {
  const BenchOp* op = nullptr;
  std::uint64_t bytes = 0;  ///< of the larger buffer
  base::DType dtype = base::DType::f32;
  plan::RankSet members;  ///< of the last rank's communicator
};

/// The calls of a simulated step, and the all_reduce of the loss. Reductions are of `reduced`.
std::vector<StepCall> step_calls(const std::vector<plan::TransferRecord>& transfers, base::DType reduced, int ranks);

/// What one call took and gave.
struct StepCallTimes {
  double us = 0;           ///< the median of the slowest rank's; 0 if it was refused
  std::string algorithm;   ///< the one that ran; "" if the chosen one refused the call
  std::string hash;        ///< of the results of all ranks
  bool same_runs = true;   ///< every call gave the same bits
  bool same_sizes = true;  ///< the first half of a reduction has the bits of a reduction of half the size
  bool refused() const { return algorithm.empty(); }
};
nlohmann::ordered_json to_json(const StepCallTimes& times);
StepCallTimes step_call_times_from_json(const nlohmann::ordered_json& json);

struct StepCallsResult {
  std::vector<StepCallTimes> calls;  ///< in the order of the step
  double total_ms = 0;               ///< the median of the slowest rank's time for all of them
};

/// Collective: makes the calls one after the other, `iterations` times. Inputs depend on rank and element only, and
/// their sums on the order of the additions. A call that the chosen algorithm refuses is left out.
StepCallsResult time_step_calls(const std::vector<StepCall>& calls, comm::Communicator& world, int iterations);

}  // namespace tessera::tools
