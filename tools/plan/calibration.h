// Fits the parameters of a machine to measured steps.
#pragma once

#include <string>
#include <vector>

#include "tools/plan/recorded_step.h"

namespace tessera::tools {

/// A step and the seconds that it was measured to take. `step` outlives it.
struct MeasuredStep {
  const RecordedStep* step = nullptr;
  double seconds = 0;
};

/// Parameters, and the names of those that were fitted; all others have the values that are assumed without
/// measurements.
struct Calibration {
  MachineParameters parameters;
  std::vector<std::string> fitted;
};

/// What is assumed of a workload's machine before any step is measured.
MachineParameters prior_of(const Workload& workload);

/// Fits at most three numbers. `workload`: of any step on the machine. Deterministic.
Calibration calibrate(const Workload& workload, const std::vector<MeasuredStep>& measured);

}  // namespace tessera::tools
