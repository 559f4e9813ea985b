// tessera bench --of-step: what the calls of a training step cost on each backend.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tools/bench/options.h"
#include "tools/bench/runner.h"
#include "tools/bench/step_calls.h"
#include "tools/cli/commands.h"

namespace tessera::tools {

/// A step whose calls are timed.
struct StepOfModel {
  std::string model;
  std::string strategy;
  int ranks = 1;
  double tokens = 0;  ///< of all ranks
  std::vector<StepCall> calls;
};

/// The measurements of one backend.
struct StepOnBackend {
  std::string backend;
  double compute_ms = 0;  ///< of a step without communication
  StepCallsResult own;    ///< with the backend's own choice of algorithms
  StepCallsResult again;  ///< the same in other processes
  /// By the text of TESSERA_ALGO. The algorithms of a backend that leaves the collectives to its library are not known.
  std::map<std::string, StepCallsResult> by_algorithm;

  /// Call i's shortest time, and its algorithm.
  const StepCallTimes& best(std::size_t i) const;
  /// The sum of the shortest times of the calls, in ms.
  double best_ms() const;
  /// The same sum of the backend's own choices.
  double own_ms() const;
  bool bits_change_with_size() const;
  bool bits_change_with_run() const;
  bool bits_change_with_algorithm() const;
};

nlohmann::ordered_json to_json(const StepOfModel& step, const std::vector<StepOnBackend>& backends);
std::string to_text(const StepOfModel& step, const std::vector<StepOnBackend>& backends);

/// Runs the command: starts the ranks of each backend, or measures as one of them. Throws InvalidUsage.
int bench_of_step(const CommandLine& commands, const BenchOptions& options, const BenchSpec& spec);

}  // namespace tessera::tools
