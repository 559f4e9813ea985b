#include "tools/report/page.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tools/cli/output.h"
#include "tools/report/html.h"
#include "tools/report/pictures.h"
#include "tools/report/style.h"

namespace tessera::tools::report {
namespace {

std::string join(const std::vector<std::string>& words) {
  std::string text;
  for (std::size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == words.size() ? " and " : ", ") + words[i];
  return text;
}

std::string paragraph(const std::string& text) { return "<p>" + escape(text) + "</p>\n"; }

std::string verdict(const Comparison& comparison) {
  const auto groups = equal_groups(comparison);
  std::string html;
  for (const auto& group : groups) {
    const Run& run = *group[0];
    std::vector<std::string> names;
    for (const Run* member : group) names.push_back(name_of(*member));
    const std::string ends = group.size() == 1 ? " ends" : " end bitwise equal";
    html += "<p class=\"verdict" + std::string(groups.size() > 1 ? " differs" : "") + "\">" +
            escape(join(names) + ends) + ": parameters <code>" + escape(run.hash) + "</code>" +
            (run.losses.empty() ? "" : ", last loss " + escape(exact(run.losses.back()))) + "</p>\n";
  }
  return html;
}

std::string head_of(const Comparison& c) {
  std::string html =
      "<h1>" + escape(c.model) + " on " + std::to_string(c.ranks) + (c.ranks == 1 ? " rank" : " ranks") + "</h1>\n";
  html += "<p class=\"soft\">" +
          escape(with_commas(c.parameters) + " parameters, backend " + c.backend + ", " + std::to_string(c.steps) +
                 (c.steps == 1 ? " step" : " steps")) +
          "</p>\n";
  if (!c.machine.empty()) html += "<p class=\"soft\">" + escape(c.machine) + "</p>\n";
  return html + verdict(c);
}

/// The losses of every step, or of evenly spaced steps if there are many.
std::string all_losses_of(const Comparison& c) {
  Table table{"Loss by step", {"step"}, {}};
  std::size_t longest = 0;
  for (const Run& run : c.runs) {
    table.head.push_back(full_name(run));
    longest = std::max(longest, run.losses.size());
  }
  constexpr std::size_t kMostRows = 200;
  const std::size_t stride = longest / kMostRows + 1;
  for (std::size_t step = 0; step < longest; step += stride) {
    std::vector<std::string> row = {std::to_string(step + 1)};
    for (const Run& run : c.runs) row.push_back(step < run.losses.size() ? exact(run.losses[step]) : "");
    table.rows.push_back(row);
  }
  return "<details><summary>Loss by step</summary>" + to_html(table) + "</details>\n";
}

std::string losses_of(const Comparison& c) {
  std::vector<Curve> all;
  std::vector<Key> keys;
  Table table{"Loss at the first and the last step, and the hash of the final parameters",
              {"strategy", "first", "last", "hash"},
              {}};
  for (const Run& run : c.runs) {
    keys.push_back({full_name(run), static_cast<int>(all.size()) % kColours});
    all.push_back({full_name(run), run.losses});
    const bool none = run.losses.empty();
    table.rows.push_back(
        {full_name(run), none ? "" : exact(run.losses.front()), none ? "" : exact(run.losses.back()), run.hash});
  }
  return "<h2>Loss</h2>\n" +
         paragraph("Global mean loss per step. Curves that lie on each other are drawn one inside the other.") +
         curves(all, "Loss over steps, one curve per strategy; the table below has the numbers") + legend(keys) +
         to_html(table) + all_losses_of(c);
}

std::string model_state_of(const Comparison& c) {
  std::vector<Bar> all;
  std::vector<Key> keys;
  Table table{"Bytes of model state, highest rank, padding included", {"strategy"}, {}};
  for (std::size_t i = 0; i < kModelState.size(); ++i) {
    keys.push_back({kModelState[i], static_cast<int>(i)});
    table.head.emplace_back(kModelState[i]);
  }
  table.head.emplace_back("total");
  for (const Run& run : c.runs) {
    const auto total = std::accumulate(run.model_state.begin(), run.model_state.end(), std::int64_t{0});
    Bar bar{full_name(run), {}, -1, human_bytes(static_cast<double>(total))};
    std::vector<std::string> row = {full_name(run)};
    for (std::size_t i = 0; i < kModelState.size(); ++i) {
      const auto bytes = static_cast<double>(run.model_state[i]);
      bar.segments.push_back({bytes, static_cast<int>(i), std::string(kModelState[i]) + ": " + human_bytes(bytes)});
      row.push_back(with_commas(run.model_state[i]));
    }
    row.push_back(with_commas(total));
    all.push_back(bar);
    table.rows.push_back(row);
  }
  return "<h2>Model state per rank</h2>\n" +
         paragraph(
             "Parameters, gradients and optimizer state between the end of backward and the "
             "end of the optimizer's step.") +
         bars(all, "Bytes of model state per rank by strategy; the table below has the numbers") + legend(keys) +
         to_html(table);
}

std::string peaks_of(const Comparison& c) {
  std::vector<Bar> all;
  std::vector<Key> keys;
  Table table{"Peak bytes, highest rank", {"strategy", "total", "reserved"}, {}};
  for (std::size_t i = 0; i < kMemoryKinds.size(); ++i) {
    keys.push_back({kMemoryKinds[i], static_cast<int>(i)});
    table.head.emplace_back(kMemoryKinds[i]);
  }
  keys.push_back({"highest sum at one instant", -1});
  for (const Run& run : c.runs) {
    const auto total = static_cast<double>(run.peak_total);
    Bar bar{full_name(run), {}, total, human_bytes(total)};
    std::vector<std::string> row = {full_name(run), with_commas(run.peak_total), with_commas(run.peak_reserved)};
    for (std::size_t i = 0; i < kMemoryKinds.size(); ++i) {
      const auto bytes = static_cast<double>(run.peak[i]);
      bar.segments.push_back({bytes, static_cast<int>(i), std::string(kMemoryKinds[i]) + ": " + human_bytes(bytes)});
      row.push_back(with_commas(run.peak[i]));
    }
    all.push_back(bar);
    table.rows.push_back(row);
  }
  return "<h2>Peak memory per rank</h2>\n" +
         paragraph(
             "The maximum of each kind. The kinds peak at different times, so the highest sum at one instant (the line "
             "and the number) lies below the end of the bar.") +
         bars(all, "Peak bytes per rank by kind and strategy; the table below has the numbers") + legend(keys) +
         to_html(table);
}

std::string communication_of(const Comparison& c) {
  std::vector<Bar> all;
  std::vector<Key> keys;
  Table table{"Per step: calls, bytes that one rank sent (highest), and the bytes of the formula",
              {"strategy", "collective", "calls", "sent", "formula", "difference"},
              {}};
  for (std::size_t i = 0; i < kCollectives.size(); ++i) keys.push_back({kCollectives[i], static_cast<int>(i)});
  keys.push_back({"formula", -1});
  for (const Run& run : c.runs) {
    const auto sent = std::accumulate(run.wire_bytes.begin(), run.wire_bytes.end(), std::int64_t{0});
    const auto formula = std::accumulate(run.formula_bytes.begin(), run.formula_bytes.end(), std::int64_t{0});
    Bar bar{full_name(run), {}, static_cast<double>(formula), human_bytes(static_cast<double>(sent))};
    for (std::size_t i = 0; i < kCollectives.size(); ++i) {
      const auto bytes = static_cast<double>(run.wire_bytes[i]);
      bar.segments.push_back({bytes, static_cast<int>(i), std::string(kCollectives[i]) + ": " + human_bytes(bytes)});
      if (run.calls[i] == 0 && run.wire_bytes[i] == 0 && run.formula_bytes[i] == 0) continue;
      table.rows.push_back({full_name(run), kCollectives[i], with_commas(run.calls[i]), with_commas(run.wire_bytes[i]),
                            with_commas(run.formula_bytes[i]), with_commas(run.wire_bytes[i] - run.formula_bytes[i])});
    }
    all.push_back(bar);
  }
  return "<h2>Communication per step</h2>\n" +
         bars(all, "Bytes sent per step by collective and strategy; the table below has the numbers") + legend(keys) +
         to_html(table);
}

std::string times_of(const Comparison& c) {
  std::vector<Bar> all;
  Table table{"Milliseconds per step, tokens per second of the whole world, bytes copied between flat buffers per step",
              {"strategy", "median", "p95", "exposed communication", "tokens/s", "copied"},
              {}};
  for (const Run& run : c.runs) {
    const double exposed = std::min(run.exposed_ms, run.step_median_ms);
    Bar bar{full_name(run), {}, run.step_p95_ms, significant(run.step_median_ms, 4) + " ms"};
    bar.segments = {
        {run.step_median_ms - exposed, 0, "compute: " + significant(run.step_median_ms - exposed, 4) + " ms"},
        {exposed, 1, "exposed communication: " + significant(exposed, 4) + " ms"}};
    all.push_back(bar);
    table.rows.push_back({full_name(run), significant(run.step_median_ms, 5), significant(run.step_p95_ms, 5),
                          significant(run.exposed_ms, 4), with_commas(std::llround(run.tokens_per_second)),
                          with_commas(run.copied_bytes)});
  }
  const std::vector<Key> keys = {{"compute", 0}, {"exposed communication", 1}, {"95th percentile", -1}};
  return "<h2>Time per step</h2>\n" + bars(all, "Milliseconds per step by strategy; the table below has the numbers") +
         legend(keys) + to_html(table);
}

}  // namespace

std::string page(const std::vector<Comparison>& comparisons) {
  std::string title;
  std::string body;
  for (const Comparison& c : comparisons) {
    title += (title.empty() ? "" : ", ") + c.model;
    body += "<section>\n" + head_of(c) + losses_of(c) + model_state_of(c) + peaks_of(c) + communication_of(c) +
            times_of(c) + "</section>\n";
  }
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>Tessera: " +
         escape(title) + "</title>\n<style>" + kPalette + kStyle + "</style></head>\n<body>\n" + body +
         "</body></html>\n";
}

}  // namespace tessera::tools::report
