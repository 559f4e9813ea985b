// The pictures of a report that a script draws: the map of tiles, timelines, memory over time, bytes, the terms of a
// gap, other settings, and losses. Their data are in the page; a table stands under each.
#pragma once

#include <string>

#include "tools/compare/comparison.h"
#include "tools/report/html.h"

namespace tessera::tools::report {

/// The data of all pictures, once for a comparison and before them.
std::string picture_data(const Comparison& comparison);

/// The pictures of a step, each with a table; "" if the comparison has no timelines.
std::string step_pictures(const Comparison& comparison);

/// Why a run is slower, and what other settings would change, as far as there are data.
std::string gap_pictures(const Comparison& comparison);

/// The style and the scripts that the pictures need, once for a document.
std::string live_style();
std::string live_scripts();

/// A document with the pictures of one step. `run` has a name, units and a timeline.
std::string page_of_step(const std::string& title, const RunResult& run);

/// A place that the script fills. `otherwise`: what stands there without JavaScript.
std::string place_for(const std::string& picture, const std::string& otherwise = "");
/// A table that opens.
std::string details(const std::string& summary, const Table& table);

/// The word with its meaning on hover and focus.
std::string defined(const std::string& word);
/// All words with their meanings.
std::string glossary();

}  // namespace tessera::tools::report
