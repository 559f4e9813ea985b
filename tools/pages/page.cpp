#include "tools/pages/page.h"

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/base/text.h"
#include "tools/cli/output.h"

namespace tessera::tools::pages {

using nlohmann::ordered_json;

namespace {

std::string paragraph(const std::string& text) { return "<p>" + escape(text) + "</p>\n"; }

std::string verdict(const Comparison& comparison) {
  const auto groups = equal_groups(comparison);
  std::string html;
  for (const auto& group : groups) {
    const RunResult& run = *group[0];
    const auto names = each_of(group, [](const RunResult* member) { return name_of(*member); });
    const std::string ends = group.size() == 1 ? " ends" : " end bitwise equal";
    html += "<p class=\"verdict" + std::string(groups.size() > 1 ? " differs" : "") + "\">" +
            escape(joined_by_and(names) + ends) + ": parameters <code>" + escape(run.final_parameters_hash) +
            "</code>" + (run.losses.empty() ? "" : ", last loss " + escape(exact(run.losses.back()))) + "</p>\n";
  }
  return html;
}

/// As a shell reads it.
std::string quoted(const std::string& argument) {
  const bool plain = !argument.empty() && argument.find_first_not_of(
                                              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                              "0123456789_-+=:,./@%") == std::string::npos;
  if (plain) return argument;
  return "'" + replaced(argument, '\'', "'\\''") + "'";
}

/// Who is slower by how much, as far as the runs can say.
std::string times_verdict(const Comparison& c) {
  if (c.runs.size() < 2) return "";
  if (c.differences.empty())
    return "<p class=\"times\">Times: one round is too few to say which is faster; use compare --repeat "
           "6.</p>\n";
  std::string html = "<ul class=\"times\">";
  for (const Difference& d : c.differences)
    html += "<li>" + escape(d.b + " against " + d.a + ": " + d.verdict) + "</li>";
  html += "</ul>\n";
  for (const std::string& line : c.noise) html += "<p class=\"soft\">" + escape("Noise: " + line) + "</p>\n";
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
  return html + verdict(c) + times_verdict(c);
}

/// The losses of every step, or of evenly spaced steps if there are many.
std::string all_losses_of(const Comparison& c) {
  Table table{"Loss by step", {"step"}};
  std::size_t longest = 0;
  for (const RunResult& run : c.runs) {
    table.head.push_back(full_name(run));
    longest = std::max(longest, run.losses.size());
  }
  constexpr std::size_t kMaxRows = 200;
  const std::size_t stride = longest / kMaxRows + 1;
  for (std::size_t step = 0; step < longest; step += stride) {
    std::vector<std::string> row = {std::to_string(step + 1)};
    for (const RunResult& run : c.runs) row.push_back(step < run.losses.size() ? exact(run.losses[step]) : "");
    table.rows.push_back(row);
  }
  return details("Loss by step", table);
}

std::string losses_of(const Comparison& c) {
  Table table{"Loss at the first and the last step, and the hash of the final parameters",
              {"strategy", "first", "last", "hash"}};
  for (const RunResult& run : c.runs) {
    const bool none = run.losses.empty();
    table.rows.push_back({full_name(run), none ? "" : exact(run.losses.front()), none ? "" : exact(run.losses.back()),
                          run.final_parameters_hash});
  }
  return "<h2>Loss</h2>\n" +
         paragraph("Global mean loss per step. Curves that lie on each other are drawn one inside the other.") +
         place_for("loss") + to_html(table) + all_losses_of(c);
}

std::string model_state_of(const Comparison& c) {
  Table table{"Bytes of model state, highest rank, padding included",
              {"strategy", "parameter", "gradient", "optimizer", "total"}};
  ordered_json rows = ordered_json::array();
  for (const RunResult& run : c.runs) {
    const auto& [parameter, gradient, optimizer] = run.model_state_bytes;
    const std::uint64_t total = run.model_state_bytes.total();
    rows.push_back({full_name(run), {parameter, gradient, optimizer}, nullptr, total});
    std::vector<std::string>& row = table.rows.emplace_back(1, full_name(run));
    for (const std::uint64_t bytes : {parameter, gradient, optimizer, total}) row.push_back(with_commas(bytes));
  }
  return "<h2>Model state per rank</h2>\n" +
         paragraph(
             "Parameters, gradients and optimizer state between the end of backward and the "
             "end of the optimizer's step.") +
         chart("bars", {{"label", "Bytes of model state per rank by strategy; the table below has the numbers"},
                        {"unit", "bytes"},
                        {"keys", {"parameter", "gradient", "optimizer"}},
                        {"rows", rows}}) +
         to_html(table);
}

std::string peaks_of(const Comparison& c) {
  Table table{"Peak bytes, highest rank", {"strategy", "total", "reserved"}};
  for (const std::string& kind : device_memory_kinds()) table.head.push_back(kind);
  ordered_json rows = ordered_json::array();
  for (const RunResult& run : c.runs) {
    const base::MemoryTracker::Snapshot& peak = run.peak_bytes;
    const std::vector<std::uint64_t> kinds(peak.peak.begin(), peak.peak.begin() + std::ssize(device_memory_kinds()));
    rows.push_back({full_name(run), kinds, peak.total_peak, peak.total_peak});
    std::vector<std::string>& row = table.rows.emplace_back(1, full_name(run));
    for (const std::uint64_t bytes : {peak.total_peak, peak.reserved}) row.push_back(with_commas(bytes));
    for (const std::uint64_t bytes : kinds) row.push_back(with_commas(bytes));
  }
  return "<h2>Peak memory per rank</h2>\n" +
         paragraph(
             "The maximum of each kind. The kinds peak at different times, so the highest sum at one instant (the line "
             "and the number) lies below the end of the bar.") +
         chart("bars", {{"label", "Peak bytes per rank by kind and strategy; the table below has the numbers"},
                        {"unit", "bytes"},
                        {"keys", device_memory_kinds()},
                        {"mark", "highest sum at one instant"},
                        {"rows", rows}}) +
         to_html(table);
}

std::string communication_of(const Comparison& c) {
  Table table{"Per step: calls, bytes that one rank sent (highest), and the bytes of the formula",
              {"strategy", "collective", "calls", "sent", "formula", "difference"}};
  for (const RunResult& run : c.runs) {
    const auto calls = run.calls_per_step.values();
    const auto wire = run.wire_bytes_per_step.values();
    const auto predicted = run.formula_bytes_per_step.values();
    for (std::size_t i = 0; i < kCollectives.size(); ++i) {
      if (calls[i] == 0 && wire[i] == 0 && predicted[i] == 0) continue;
      std::vector<std::string>& row = table.rows.emplace_back(1, full_name(run));
      row.emplace_back(kCollectives[i]);
      row.push_back(calls_text(calls[i]));
      row.push_back(with_commas(wire[i]));
      for (const auto value : {predicted[i], wire[i] - predicted[i]})
        row.push_back(run.formula_bytes_per_step.data() == 0 && wire[i] > 0
                          ? "-"
                          : with_commas(static_cast<std::int64_t>(value)));
    }
  }
  return "<h2>Communication per step</h2>\n" +
         paragraph(
             "Bytes that a rank sends. Ticks are the formula for each collective: a bar that ends at its tick "
             "sends what the formula says.") +
         place_for("bytes") + details("Calls and bytes", table);
}

std::string times_of(const Comparison& c) {
  Table table{"Milliseconds per step, tokens per second of the whole world, bytes copied between flat buffers per step",
              {"strategy", "median", "p95", "exposed communication", "tokens/s", "copied"}};
  ordered_json rows = ordered_json::array();
  for (const RunResult& run : c.runs) {
    rows.push_back(step_bar(full_name(run), run));
    rows.back()[2] = run.step_ms_p95;
    table.rows.push_back({full_name(run), significant(run.step_ms_median, 5), significant(run.step_ms_p95, 5),
                          significant(run.exposed_communication_ms, 4),
                          with_commas(std::llround(run.tokens_per_second)), with_commas(run.copied_bytes_per_step)});
  }
  return "<h2>Time per step</h2>\n" +
         chart("bars", {{"label", "Milliseconds per step by strategy; the table below has the numbers"},
                        {"unit", "ms"},
                        {"keys", {"compute", "exposed communication"}},
                        {"mark", "95th percentile"},
                        {"rows", rows}}) +
         to_html(table);
}

/// How far each simulated step is from the measured one.
std::string distances_of(const WhatIf& what_if) {
  if (!what_if.link_given)
    return "The runs had no --link, so their links are not known, and the simulated steps can't be compared with the "
           "measured ones. ";
  std::string text;
  for (const WhatIf::Run& run : what_if.runs) {
    if (!run.left_out.empty() || run.measured_ms <= 0) continue;
    const double percent = std::round((run.simulated_ms / run.measured_ms - 1) * 100);
    text += (text.empty() ? "" : ", ") + run.name + " " + (percent < 0 ? "\u2212" : "+") +
            significant(std::abs(percent), 3) + " %";
  }
  return text.empty() ? "" : "In the setting of the runs, simulated steps differ from measured ones by: " + text + ". ";
}

Table steps_of(const WhatIf& what_if) {
  Table table{"Milliseconds of a step in the setting of the runs", {"strategy", "measured", "simulated"}};
  for (const WhatIf::Run& run : what_if.runs)
    table.rows.push_back({run.name, significant(run.measured_ms, 5),
                          run.left_out.empty() ? significant(run.simulated_ms, 5) : "left out: " + run.left_out});
  return table;
}

}  // namespace

std::string what_if_section(const WhatIf& what_if) {
  std::string html =
      "<h2>What if</h2>\n<p>A simulation: the strategies in the order of their own calls, over links of which each " +
      defined("rank") + " has a port that its operations pass one after the other. Forward, backward and " +
      defined("optimizer") + " take as long as they did here: " + escape(what_if.machine) + " a rank. " +
      escape(distances_of(what_if)) + "</p>\n";
  for (const WhatIf::Run& run : what_if.runs)
    if (!run.left_out.empty())
      html += "<p>" + escape(run.name + " is left out: " + run.left_out) + ".</p>\n";
    else if (!run.memory_known)
      html += "<p>" +
              escape("The memory of " + run.name + " is left out: it does not grow in proportion to the tokens") +
              ".</p>\n";
  return html + place_for("what-if") + details("Simulated and measured steps", steps_of(what_if));
}

std::string command_of(const Comparison& c) {
  if (c.command.empty()) return "";
  std::string line = "tessera";
  for (const std::string& argument : c.command) line += " " + quoted(argument);
  return "<h2>Command</h2>\n<p>The page comes from:</p>\n<pre class=\"scroll\" tabindex=\"0\">" + escape(line) +
         "</pre>\n";
}

std::string full_name(const RunResult& run) {
  if (run.mesh[0] == 1 || run.mesh[1] == 1) return name_of(run);
  return run.strategy + " " + mesh_text(run) + (run.wrap.empty() ? "" : " " + run.wrap);
}

std::vector<std::string> device_memory_kinds() {
  std::vector<std::string> names;
  for (std::size_t i = 0; i + 1 < base::kMemoryUses; ++i)
    names.emplace_back(base::name_of(static_cast<base::MemoryCategory>(i)));
  return names;
}

ordered_json step_bar(const std::string& name, const RunResult& run) {
  const double exposed = std::min(run.exposed_communication_ms, run.step_ms_median);
  return {name, {run.step_ms_median - exposed, exposed}, nullptr, run.step_ms_median};
}

std::string page(const std::vector<Comparison>& comparisons) {
  std::string title;
  std::string body;
  for (const Comparison& c : comparisons) {
    title += (title.empty() ? "" : ", ") + c.model;
    body += "<section>\n" + head_of(c) + picture_data(c) + step_pictures(c) + communication_of(c) + gap_pictures(c) +
            losses_of(c) + model_state_of(c) + peaks_of(c) + times_of(c) + command_of(c) + "</section>\n";
  }
  return document(title, body + glossary());
}

std::string document(const std::string& title, const std::string& body) {
  const std::string style = std::string(kPalette) + std::string(kPageStyle);
  std::string scripts;
  std::string hashes;
  for (const std::string_view script : {kD3, kPageScript}) {
    scripts.append("<script>").append(script).append("</script>\n");
    hashes += " " + hash_source(std::string(script));
  }
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; base-uri 'none'; form-action "
         "'none'; "
         "script-src" +
         hashes + "; style-src " + hash_source(style) + "\">\n<title>Tessera: " + escape(title) + "</title>\n<style>" +
         style + "</style></head>\n<body>\n" + body + scripts + "</body></html>\n";
}

std::string escape(std::string_view text) {
  constexpr std::string_view kSpecial = "&<>\"'";
  constexpr std::array<std::string_view, 5> kEntities = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
  std::string result;
  for (const char c : base::printable(text, "\n\t")) {
    const std::size_t at = kSpecial.find(c);
    result += at == std::string_view::npos ? std::string_view(&c, 1) : kEntities[at];
  }
  return result;
}

std::string significant(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "NaN" : (value < 0 ? "-inf" : "inf");
  return fmt::format("{:.{}g}", value, digits);
}

std::string exact(double value) {
  if (!std::isfinite(value)) return significant(value, 1);
  std::array<char, 64> text{};
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), value).ptr};
}

std::string to_html(const Table& table) {
  std::string html = "<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"" + escape(table.caption) +
                     "\"><table><caption>" + escape(table.caption) + "</caption><thead><tr>";
  for (const std::string& title : table.head) html += "<th scope=\"col\">" + escape(title) + "</th>";
  html += "</tr></thead><tbody>";
  for (const auto& row : table.rows) {
    html += "<tr>";
    for (std::size_t i = 0; i < row.size(); ++i)
      html += i == 0 ? "<th scope=\"row\">" + escape(row[i]) + "</th>" : "<td>" + escape(row[i]) + "</td>";
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

std::string hash_source(const std::string& text) {
  std::array<unsigned char, 32> hash{};
  unsigned length = 0;
  if (EVP_Digest(text.data(), text.size(), hash.data(), &length, EVP_sha256(), nullptr) != 1)
    throw base::SystemError("report: SHA-256 failed");
  std::array<unsigned char, 4 * 11 + 1> base64{};
  EVP_EncodeBlock(base64.data(), hash.data(), static_cast<int>(length));
  return std::string("'sha256-") + reinterpret_cast<const char*>(base64.data()) + "'";
}

}  // namespace tessera::tools::pages
