// compare --why: what the runs record, and why one of them is slower than another.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "tools/plan/planned_why.h"
#include "tools/results/comparison.h"

namespace tessera::tools {

/// Has the runs of `plan` record what they wait for: over the links of --link, or without it over those that are there,
/// which are then measured. Throws InvalidUsage for devices other than the cpu.
void record_waits(TrainPlan& plan);

/// Of runs without --link: the median of what they measured, which gives each of them volume and latency. What a wait
/// took after the last rank had called is then all `exposed`: the fit doesn't say when the links had passed it.
comm::SlowLinks apply_link_fits(const std::vector<RunResult*>& runs);

/// Why the second of the measured runs is slower. `parts`: of each by round. The machine of the simulations that say
/// what would help is calibrated by these.
Why measured_why(const PlannedRun& from, const PlannedRun& to,
                 const std::pair<std::vector<StepParts>, std::vector<StepParts>>& parts, const comm::SlowLinks& links);

}  // namespace tessera::tools
