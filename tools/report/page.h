// The report page: one HTML file that needs nothing else.
#pragma once

#include <string>
#include <vector>

#include "tools/report/comparison.h"

namespace tessera::tools::report {

/// Pictures and tables of each comparison, one below the other.
std::string page(const std::vector<Comparison>& comparisons);

/// Writes page() to a file, which is replaced. Throws InvalidUsage where it can't be written.
void write_page(const std::vector<Comparison>& comparisons, const std::string& path);

}  // namespace tessera::tools::report
