// The pictures of a report that a script draws: the map of shards, timelines, memory over time, bytes, the terms of a
// gap, other settings, losses, bars and lines. Their data are in the page; a table stands under each.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/pages/html.h"
#include "tools/results/comparison.h"

namespace tessera::tools::pages {

/// What a page tells about one step beside its pictures.
struct StepStory {
  struct Sentence {
    std::int64_t at_ns = 0;  ///< since the begin of the step; it holds until the next
    std::string text;
  };
  std::string title;
  std::string times;                 ///< a sentence: whose times these are
  std::string teller;                ///< of whom the sentences are: "every rank"
  std::vector<Sentence> sentences;   ///< by time; empty: those of the pictures
  std::string text;                  ///< the whole story
  std::vector<std::string> command;  ///< arguments of the program that made it
};

/// The data of all pictures, once for a comparison and before them. `story`: of its only run; null for runs of compare.
std::string picture_data(const Comparison& comparison, const StepStory* story = nullptr);

/// The pictures of a step, each with a table; "" if the comparison has no timelines.
std::string step_pictures(const Comparison& comparison, const StepStory* story = nullptr);

/// Why a run is slower, and what other settings would change, as far as there are data.
std::string gap_pictures(const Comparison& comparison);

/// A document with the pictures of one step. `run` has a name, units and a timeline.
std::string page_of_step(const StepStory& story, const RunResult& run);

/// A place that the script fills from the section's data. A table with the numbers must follow it.
std::string place_for(const std::string& picture);
/// The same with data of its own. `kind`: "bars" or "lines"; charts.js says what is in `data`.
std::string chart(const std::string& kind, const nlohmann::ordered_json& data);
/// A table that opens.
std::string details(const std::string& summary, const Table& table);

/// The word with its meaning on hover and focus.
std::string defined(const std::string& word);
/// All words with their meanings.
std::string glossary();

}  // namespace tessera::tools::pages
