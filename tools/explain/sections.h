// The facts of a step as text.
#pragma once

#include <string>

#include "tools/explain/explanation.h"

namespace tessera::tools {

/// The sections that the options show, each line at most 100 columns wide.
std::string to_text(const Explanation& explanation, const ExplainOptions& options);

/// One question with its answer. Throws InvalidUsage if the step has no facts for it.
std::string answer_text(const Explanation& explanation, const std::string& name);

}  // namespace tessera::tools
