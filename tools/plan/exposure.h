// Why a planned step waits for communication, in words.
#pragma once

#include <string>
#include <vector>

#include "tools/plan/step_plan.h"

namespace tessera::tools {

/// Sentences about the longest waits of the step: how long, beside what, and from how many tokens on the transfer would
/// be hidden. `tokens`: of a rank in a microbatch.
std::vector<std::string> exposure_sentences(const StepPlan& plan, std::int64_t tokens);

}  // namespace tessera::tools
