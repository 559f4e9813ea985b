// One strategy's runs of several rounds as one result.
#pragma once

#include <string>
#include <vector>

#include "tools/results/run_result.h"

namespace tessera::tools {

/// Times are medians over the rounds; bytes, calls and memory are those of the first round, or the highest peak. Needs
/// a round or more.
RunResult combine_rounds(const std::vector<RunResult>& rounds);

/// Which of the rounds, from 0, has the median time; of two, the first.
std::size_t median_round(const std::vector<double>& step_ms);

/// A line for each run whose rounds ended with different losses or parameters; "" if there is none.
std::string unequal_rounds_text(const std::vector<RunResult>& runs);

}  // namespace tessera::tools
