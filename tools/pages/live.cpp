// The pictures of pages, with their tables.
#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/pages/page.h"

namespace tessera::tools::pages {
namespace {

using nlohmann::ordered_json;

/// JSON that can stand in a script element, whatever its texts contain.
std::string json_for_script(const ordered_json& json) { return replaced(json_text(json), '<', "\\u003c"); }

std::string place(const std::string& picture, const std::string& kind, const std::string& data) {
  return "<div class=\"" + kind + "\" data-picture=\"" + picture + "\">" + data +
         "<noscript><p class=\"soft\">This picture needs JavaScript; the table below has its numbers.</p></noscript>"
         "</div>\n";
}

/// Losses and bytes, which every comparison has.
ordered_json totals_of(const Comparison& c) {
  ordered_json totals = ordered_json::array();
  for (const RunResult& run : c.runs) {
    const auto shown = [](double loss) { return std::isfinite(loss) ? ordered_json(loss) : nullptr; };
    totals.push_back({{"name", name_of(run)},
                      {"losses", each_of(run.losses, shown)},
                      {"sent", run.wire_bytes_per_step.values()},
                      {"formula", run.formula_bytes_per_step.values()}});
  }
  return totals;
}

ordered_json data_of(const Comparison& c, const std::vector<StepStory>& stories) {
  ordered_json runs = ordered_json::array();
  for (std::size_t i = 0; i < c.runs.size(); ++i) {
    const RunResult& run = c.runs[i];
    if (!run.timeline) continue;
    ordered_json units = ordered_json::array();
    for (const RunResult::Unit& unit : run.units) units.push_back({{"name", unit.name}, {"elements", unit.elements}});
    runs.push_back({{"name", name_of(run)},
                    {"strategy", run.strategy},
                    {"units", units},
                    {"pieces", run.timeline->pieces},
                    {"predicted", run.timeline->predicted_state},
                    {"held", run.peak_bytes.reserved > 0 ? run.peak_bytes.total_peak + run.peak_bytes.reserved : 0},
                    {"world", run.mesh[0] * run.mesh[1]},
                    {"timeline", to_json(*run.timeline)}});
    if (stories.empty() || stories[i].sentences.empty()) continue;
    ordered_json sentences = ordered_json::array();
    for (const StepStory::Sentence& s : stories[i].sentences) sentences.push_back({s.at_ns, s.text});
    runs.back()["story"] = {{"teller", stories[i].teller}, {"sentences", sentences}};
  }
  ordered_json data = {{"runs", runs}, {"totals", totals_of(c)}};
  if (c.why) data["why"] = to_json(*c.why);
  if (c.what_if) data["what_if"] = to_json(*c.what_if);
  return data;
}

/// `keys`: class and text.
std::string keys_of(const std::vector<std::pair<std::string, std::string>>& keys) {
  std::string html = "<ul class=\"legend\">";
  for (const auto& [kind, text] : keys) html += "<li><span class=\"key " + kind + "\"></span>" + text + "</li>";
  return html + "</ul>\n";
}

std::string milliseconds(std::int64_t ns) { return significant(static_cast<double>(ns) / 1e6, 5); }

std::string map_of(const Comparison& c) {
  Table table{"Elements of each unit, and of each rank's shard at rest", {"strategy", "unit", "elements", "shard"}};
  for (const RunResult& run : c.runs) {
    if (!run.timeline) continue;
    for (const RunResult::Unit& unit : run.units)
      table.rows.push_back({name_of(run), unit.name, with_commas(unit.elements),
                            with_commas((unit.elements + unit.padding) / run.timeline->pieces[0])});
  }
  return "<h2>Who holds what</h2>\n<p>A row is a " + defined("rank") + ", a column a " + defined("unit") +
         ", a box a " + defined("shard") + ". The strip below a box shows gradients. Move the slider through the " +
         defined("step") + ": arrow keys go from event to event, Space plays.</p>\n" + place_for("map") +
         keys_of({{"own", "own shard, always here"},
                  {"here", "others' shards, " + defined("unsharded")},
                  {"coming", defined("in flight")},
                  {"", "not here"},
                  {"backward", "gradients of own data"},
                  {"way", "gradients in flight"},
                  {"opt", "mean of all ranks' gradients"}}) +
         details("Units and shards", table);
}

/// The length of all that events of these kinds cover.
std::int64_t covered_ns(const std::vector<base::TraceEvent>& events, const std::set<base::TraceEventKind>& kinds) {
  std::vector<std::pair<std::int64_t, std::int64_t>> spans;
  for (const base::TraceEvent& e : events)
    if (kinds.contains(e.kind)) spans.emplace_back(e.start_ns, e.end_ns);
  return tools::covered_ns(std::move(spans));
}

std::string timelines_of(const Comparison& c, bool measured) {
  Table table{"Milliseconds in the step shown",
              {"strategy", "rank", "step", "forward", "backward", "optimizer", "exposed", "all-gathers", "reductions"}};
  for (const RunResult& run : c.runs) {
    if (!run.timeline) continue;
    for (const RankTimeline& rank : run.timeline->ranks) {
      using Kind = base::TraceEventKind;
      std::vector<std::string> row = {name_of(run), std::to_string(rank.rank), milliseconds(run.timeline->length_ns)};
      // A span may hold others: units inside the root, waits, a forward that backward repeats. Each moment counts once.
      std::set<Kind> counted = {Kind::unshard_wait, Kind::reduce_wait};
      const std::int64_t exposed = covered_ns(rank.events, counted);
      std::int64_t before = exposed;
      std::array<std::int64_t, 3> computing{};  // backward first
      for (const auto& [i, kind] : {std::pair(1, Kind::backward), {0, Kind::forward}, {2, Kind::optimizer_step}}) {
        counted.insert(kind);
        const std::int64_t now = covered_ns(rank.events, counted);
        computing.at(static_cast<std::size_t>(i)) = now - std::exchange(before, now);
      }
      for (const std::int64_t ns : computing) row.push_back(milliseconds(ns));
      row.push_back(milliseconds(exposed));
      for (const Kind kind : {Kind::unshard_issue, Kind::reduce_issue})
        row.push_back(std::to_string(std::ranges::count(rank.events, kind, &base::TraceEvent::kind)));
      table.rows.push_back(std::move(row));
    }
  }
  const bool carried = std::ranges::any_of(c.runs, [](const RunResult& run) {
    return run.timeline && !run.timeline->ranks.empty() && !run.timeline->ranks.front().transfers.empty();
  });
  std::vector<std::pair<std::string, std::string>> keys = {{"forward", "forward"},
                                                           {"backward", "backward"},
                                                           {"opt", defined("optimizer")},
                                                           {"wait", defined("exposed")},
                                                           {"gather", carried ? "all-gather" : "all-gather in flight"},
                                                           {"reduce", carried ? "reduction" : "reduction in flight"}};
  if (carried) keys.emplace_back("queued", "waits for its link");
  return std::string("<h2>One step over time</h2>\n<p>") +
         (measured ? "The measured step of median length, all strategies on one clock. " : "") +
         "The upper row of a rank computes; hatched is " + defined("exposed") +
         ": computing waits, for the milliseconds above. The rows below show what is " + defined("in flight") +
         (carried ? ": thin and dotted from its call until a link is free, solid on the link"
                  : ", from its call until computing has it") +
         "; at a black tick a unit is " + defined("reshard") + "ed.</p>\n" + place_for("timeline") + keys_of(keys) +
         details("Sums by rank", table);
}

std::string memory_of(const Comparison& c) {
  Table table{
      "Bytes at the highest instant of the step shown, of the rank that needs most; and ZeRO's formula for model state",
      {"strategy", "rank", "at ms", "total", "formula"}};
  for (const std::string& kind : device_memory_kinds()) table.head.push_back(kind);
  for (const RunResult& run : c.runs) {
    if (!run.timeline) continue;
    const MemorySample* most = nullptr;
    int rank_of_most = 0;
    for (const RankTimeline& rank : run.timeline->ranks)
      for (const MemorySample& sample : rank.memory)
        if (most == nullptr || sample.total() > most->total()) {
          most = &sample;
          rank_of_most = rank.rank;
        }
    if (most == nullptr) continue;
    const std::uint64_t formula = run.timeline->predicted_state;
    std::vector<std::string> row = {name_of(run), std::to_string(rank_of_most), milliseconds(most->at_ns),
                                    with_commas(most->total()), formula == 0 ? "-" : with_commas(formula)};
    for (std::size_t i = 0; i + 1 < base::kMemoryUses; ++i) row.push_back(with_commas(most->bytes[i]));
    table.rows.push_back(std::move(row));
  }
  return "<h2>Memory over the step</h2>\n<p>Live bytes by kind, of the rank that needs most. The dashed line is the " +
         defined("formula") + " for " + defined("model state") + "; what lies above it are " + defined("activation") +
         "s, " + defined("unsharded") + " units and buffers.</p>\n" + place_for("memory") +
         details("Bytes at the peak", table);
}

std::string why_of(const Why& why) {
  Table table{"Milliseconds by which each term makes the step longer", {"term", "ms", "low", "high"}};
  std::string meanings;
  const bool measured = why.rounds > 1;
  for (const WhyTerm& term : why.terms) {
    table.rows.push_back({term.name, significant(term.ms, 5), measured ? significant(term.interval.low, 5) : "",
                          measured ? significant(term.interval.high, 5) : ""});
    meanings += (meanings.empty() ? "" : ", ") + defined(term.name);
  }
  table.rows.push_back({"sum", significant(why.gap_ms, 5), "", ""});
  Table helps{"Simulated with one thing changed; these do not add up", {"change", "step ms", "gap ms", "peak bytes"}};
  for (const WhyHelp& help : why.helps)
    helps.rows.push_back(
        {help.change, significant(help.step_ms, 5), significant(help.gap_ms, 5), with_commas(help.peak_bytes)});
  const std::string heading = "Why " + why.to + (why.gap_ms < 0 ? " is faster than " : " is slower than ") + why.from;
  return "<h2>" + escape(heading) + "</h2>\n<p>The gap of " + escape(significant(why.gap_ms, 4)) +
         " ms as a sum: " + meanings + ". " +
         escape(!measured              ? "The terms are those of the simulation."
                : why.coverage >= 0.95 ? "Grey terms have an interval that holds 0."
                                       : "All terms are grey: these rounds are too few to tell them from noise.") +
         " Volume and latency are those of " + escape(why.link) + ".</p>\n" + place_for("why") +
         details("Terms with intervals", table) + (helps.rows.empty() ? "" : details("What would change it", helps));
}

}  // namespace

std::string place_for(const std::string& picture) { return place(picture, "live", ""); }

std::string chart(const std::string& kind, const ordered_json& data) {
  return place(kind, "live chart", "<script type=\"application/json\">" + json_for_script(data) + "</script>");
}

std::string details(const std::string& summary, const Table& table) {
  return "<details><summary>" + escape(summary) + "</summary>" + to_html(table) + "</details>\n";
}

std::string defined(const std::string& word) {
  const auto found = std::ranges::find(words(), word, &Word::name);
  if (found == words().end()) throw base::InvalidUsage("the glossary has no '" + word + "'");
  return "<dfn tabindex=\"0\">" + escape(word) + "<span role=\"tooltip\">" + escape(found->meaning) + "</span></dfn>";
}

std::string glossary() {
  std::string html = "<h2>Words</h2>\n<details class=\"words\"><summary>What the words mean</summary><dl>";
  for (const Word& word : words()) html += "<dt>" + escape(word.name) + "</dt><dd>" + escape(word.meaning) + "</dd>\n";
  return html + "</dl></details>\n";
}

std::string picture_data(const Comparison& c, const std::vector<StepStory>& stories) {
  return "<script type=\"application/json\" class=\"data\">" + json_for_script(data_of(c, stories)) + "</script>\n";
}

std::string step_pictures(const Comparison& c, const std::vector<StepStory>& stories) {
  if (std::ranges::none_of(c.runs, [](const RunResult& run) { return run.timeline.has_value(); })) return "";
  return "<div class=\"controls chips\" role=\"group\" aria-label=\"Strategies in the pictures, one or two\" "
         "data-picture=\"chips\"></div>\n" +
         (c.runs[0].units.empty() ? "" : map_of(c)) + timelines_of(c, stories.empty()) + memory_of(c);
}

std::string gap_pictures(const Comparison& c) {
  return (c.why ? why_of(*c.why) : "") + (c.what_if ? what_if_section(*c.what_if) : "");
}

std::string page_of_step(const std::vector<StepStory>& stories, std::vector<RunResult> runs) {
  const StepStory& first = stories.front();
  const Comparison comparison{.model = first.title, .runs = std::move(runs), .command = first.command};
  std::string text;
  for (const StepStory& story : stories) text += (text.empty() || story.text.empty() ? "" : "\n\n") + story.text;
  if (!text.empty())
    text =
        "<h2>The step in words</h2>\n<details><summary>What explain prints</summary><pre class=\"scroll\" "
        "tabindex=\"0\">" +
        escape(text) + "</pre></details>\n";
  return document(first.title, "<section>\n<h1>" + escape(first.title) + "</h1>\n<p class=\"soft\">" +
                                   escape(first.times) + "</p>\n" + picture_data(comparison, stories) +
                                   step_pictures(comparison, stories) + text + command_of(comparison) + "</section>\n" +
                                   glossary());
}

}  // namespace tessera::tools::pages
