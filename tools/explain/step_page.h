// The step that explain tells over time, and the page that shows it.
#pragma once

#include <string>
#include <vector>

#include "tools/explain/explanation.h"

namespace tessera::tools {

/// The simulated step of the first ranks, which are all equal: what pages show of many. `length_ns`: of the step.
StepTimeline simulated_timeline(const StepPlan& step, std::int64_t length_ns);

/// `command`: arguments of the program.
std::string explain_page(const Explanation& explanation, const std::vector<std::string>& command);

}  // namespace tessera::tools
