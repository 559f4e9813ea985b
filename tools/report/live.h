// The pictures of a report that move: the map of tiles, timelines, memory over time, and the terms of a gap. A script
// draws them from data in the page; a table stands under each.
#pragma once

#include <string>

#include "tools/compare/comparison.h"
#include "tools/report/html.h"

namespace tessera::tools::report {

/// The pictures for which the comparison has data, each with a table; "" if there are none.
std::string live_pictures(const Comparison& comparison);

/// The style and the scripts that the pictures need, once for a document.
std::string live_style();
std::string live_scripts();

/// A document with the pictures of one step. `run` has a name, units and a timeline.
std::string page_of_step(const std::string& title, const RunResult& run);

/// A place that the script fills.
std::string place_for(const std::string& picture);
/// A table that opens.
std::string details(const std::string& summary, const Table& table);

/// The word with its meaning on hover and focus.
std::string defined(const std::string& word);
/// All words with their meanings.
std::string glossary();

}  // namespace tessera::tools::report
