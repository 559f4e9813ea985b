// The report page: one self-contained HTML file.
#pragma once

#include <string>
#include <vector>

#include "tools/compare/comparison.h"

namespace tessera::tools::report {

/// Pictures and tables of each comparison, one below the other.
std::string page(const std::vector<Comparison>& comparisons);

/// The command that makes a page again; "" if it is not known.
std::string command_of(const Comparison& comparison);

/// A whole document in the report's style. `title` is text, `body` HTML. The only script and style sheets that a
/// browser runs in it are the report's own, whose hashes its policy has.
std::string document(const std::string& title, std::string body);

}  // namespace tessera::tools::report
