// The report page of new comparisons.
#pragma once

#include <string>
#include <vector>

#include "tools/compare/compare.h"

namespace tessera::tools {

/// One self-contained HTML page with the pictures and tables of each; it states that they ran on this machine.
std::string report_page(const std::vector<Comparison>& comparisons);

}  // namespace tessera::tools
