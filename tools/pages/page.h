// Pages: self-contained HTML files. A script draws their pictures: the map of shards, timelines, memory over time,
// bytes, the terms of a gap, other settings, losses, bars and lines. The data are in the page; a table stands under
// each.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tools/results/comparison.h"

namespace tessera::tools::pages {

/// Text that is valid in an element or a quoted attribute, whatever it contains.
std::string escape(std::string_view text);

/// The shortest form with `digits` significant digits: "1.23", "0.5".
std::string significant(double value, int digits);

/// The shortest form that reads back as the same bits.
std::string exact(double value);

/// A table whose first column names the rows. Cells and titles are text: the table escapes them.
struct Table {
  std::string caption;
  std::vector<std::string> head;
  std::vector<std::vector<std::string>> rows = {};
};
std::string to_html(const Table& table);

/// What permits this script or style sheet, and no other, in a Content-Security-Policy.
std::string hash_source(const std::string& text);

// The files of live/, D3 and the presets of clusters, as constants that the build writes.
extern const std::string_view kD3;       ///< of node-d3: version 5, minified
extern const std::string_view kPalette;  ///< colors of the light and dark schemes: --c0 to --c7 distinguish items
extern const std::string_view kPageStyle;
extern const std::string_view kClusters;    ///< plan/clusters.json
extern const std::string_view kPageScript;  ///< the files of live/, which share their names

/// The report: pictures and tables of each comparison, one below the other.
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

/// The data of all pictures, once for a comparison and before them. `stories`: of its runs; empty for runs of compare.
std::string picture_data(const Comparison& comparison, const std::vector<StepStory>& stories = {});

/// The pictures of a step, each with a table; "" if the comparison has no timelines.
std::string step_pictures(const Comparison& comparison, const std::vector<StepStory>& stories = {});

/// Why a run is slower, and what other settings would change, as far as there are data.
std::string gap_pictures(const Comparison& comparison);

/// A document with the pictures of one step, under one strategy or several. Runs have names, units and timelines, and
/// a story each, of which the first has the page's title, times and command.
std::string page_of_step(const std::vector<StepStory>& stories, std::vector<RunResult> runs);

/// A place that the script fills from the section's data. A table with the numbers must follow it.
std::string place_for(const std::string& picture);
/// The same with data of its own. `kind`: "bars", "lines", "curves" or "heat"; charts.js and curves.js say what is in
/// `data`.
std::string chart(const std::string& kind, const nlohmann::ordered_json& data);
/// A table that opens.
std::string details(const std::string& summary, const Table& table);

/// The word with its meaning on hover and focus.
std::string defined(const std::string& word);
/// All words with their meanings.
std::string glossary();

}  // namespace tessera::tools::pages
