// The report page of comparisons that were just made.
#pragma once

#include <string>
#include <vector>

#include "tools/compare/compare.h"

namespace tessera::tools {

/// One self-contained HTML page with the pictures and tables of each; says that they ran on this machine.
std::string report_page(const std::vector<Comparison>& comparisons);

}  // namespace tessera::tools
