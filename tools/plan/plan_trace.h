// The trace of a simulated step.
#pragma once

#include <string>

#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// As a run's trace, with the transfers as further rows.
std::string trace_text(const StepPlan& plan);

}  // namespace tessera::tools
