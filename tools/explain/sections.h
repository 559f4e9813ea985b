// The facts of a step as text.
#pragma once

#include <string>

#include "tools/explain/explanation.h"

namespace tessera::tools {

/// The sections that the options show, in lines of at most `width` columns: 80 or 100.
std::string to_text(const Explanation& explanation, const ExplainOptions& options, std::size_t width);

/// One question with its answer. Throws InvalidUsage if the step has no facts for it.
std::string answer_text(const Explanation& explanation, const std::string& name, std::size_t width);

}  // namespace tessera::tools
