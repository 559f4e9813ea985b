// The trace of a simulated step.
#pragma once

#include <string>
#include <vector>

#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// The transfers of the step, in the order of StepPlan::transfers.
std::vector<base::TransferEvent> transfer_events(const StepPlan& plan);

/// As a run's trace, with the transfers as further rows.
std::string trace_text(const StepPlan& plan);

}  // namespace tessera::tools
