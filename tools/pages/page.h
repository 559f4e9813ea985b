// The report page: one self-contained HTML file.
#pragma once

#include <string>
#include <vector>

#include "tools/results/comparison.h"

namespace tessera::tools::pages {

/// Pictures and tables of each comparison, one below the other.
std::string page(const std::vector<Comparison>& comparisons);

/// The section about other links, ranks and batches.
std::string what_if_section(const WhatIf& what_if);

/// The command that makes a page again; "" if it is not known.
std::string command_of(const Comparison& comparison);

/// The strategy, with the wrapping if several are compared, and with the mesh if that has two axes.
std::string full_name(const RunResult& run);

/// Kinds of the device's memory in the order of base::MemoryCategory: all but `offloaded`.
std::vector<std::string> device_memory_kinds();

/// A row of a chart of bars: computing and exposed communication in the median step, without a mark.
nlohmann::ordered_json step_bar(const std::string& name, const RunResult& run);

/// A whole document in the report's style. `title` is text, `body` HTML. The only script and style sheets that a
/// browser runs in it are the report's own, whose hashes its policy has.
std::string document(const std::string& title, const std::string& body);

}  // namespace tessera::tools::pages
