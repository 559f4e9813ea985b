// The report page: one self-contained HTML file.
#pragma once

#include <string>
#include <vector>

#include "tools/compare/comparison.h"

namespace tessera::tools::report {

/// Pictures and tables of each comparison, one below the other.
std::string page(const std::vector<Comparison>& comparisons);

}  // namespace tessera::tools::report
