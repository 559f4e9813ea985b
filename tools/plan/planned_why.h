// Why the steps of one strategy take longer than those of another, by simulation, and what would help.
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/slow_link/slow_link.h"
#include "tools/cli/quantities.h"
#include "tools/plan/step_plan.h"
#include "tools/results/why.h"

namespace tessera::tools {

/// A run that is simulated: `plan` with another strategy.
struct PlannedRun {
  std::string name;  ///< as shown
  std::string strategy;
  const TrainPlan& plan;
};

/// The machine of --link and --machine.
struct LinkedMachine {
  comm::SlowLinks links;
  MachineSpec machine;
  int ranks = 1;
};

/// The figures of a link.
LinkSpec spec_of(const comm::SlowLink& link);

/// "20us,20MB/s", or with those inside the hosts.
std::string link_words(const comm::SlowLinks& links);

StepPlan plan_step(const PlannedRun& run, const LinkedMachine& machine);

/// The simulated step as a measured one is cut. All of its ranks are equal and wake up at once, so `late` and
/// `transport` are 0.
StepParts parts_of(const StepPlan& step, const LinkedMachine& machine);

/// The machine on which the simulated ranks of both runs compute as long as `measured_ms` says: the sum of their
/// `compute` and `optimizer`. Both of its speeds change by the same factor.
LinkedMachine calibrated(LinkedMachine machine, const PlannedRun& from, const PlannedRun& to, double measured_ms);

/// `to` as it is, with links without latency or of double rate, with parameters kept after forward, under zero2 and
/// hsdp. What can't run, or changes nothing, is left out.
std::vector<WhyHelp> what_helps(const PlannedRun& from, const PlannedRun& to, const LinkedMachine& machine);

/// Throws InvalidUsage for a strategy whose replicas synchronize in some steps only: --why is about one step.
void require_equal_steps(const PlannedRun& run);

/// Adds up to a nanosecond.
Why planned_why(const PlannedRun& from, const PlannedRun& to, const LinkedMachine& machine);

}  // namespace tessera::tools
