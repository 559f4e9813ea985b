// Tables as text.
#pragma once

#include <string>
#include <vector>

namespace tessera::tools {

/// The rows in columns, each row as a line: the first column is left-aligned, all others right-aligned. All rows have
/// the length of the first.
std::string text_table(const std::vector<std::vector<std::string>>& rows);

}  // namespace tessera::tools
