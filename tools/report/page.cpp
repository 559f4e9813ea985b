#include "tools/report/page.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "tools/cli/output.h"
#include "tools/report/html.h"
#include "tools/report/live.h"
#include "tools/report/pictures.h"
#include "tools/report/style.h"

namespace tessera::tools::report {
namespace {

constexpr std::array<const char*, 4> kCollectives = {"all_gather", "reduce_scatter", "all_reduce", "control"};
constexpr std::array<const char*, 3> kModelState = {"parameter", "gradient", "optimizer"};
/// Kinds of the device's memory: all but `offloaded`.
constexpr std::size_t kMemoryKinds = base::kMemoryUses - 1;

std::int64_t signed_of(std::uint64_t value) { return static_cast<std::int64_t>(value); }

/// By kCollectives.
std::array<std::int64_t, 4> values_of(const PerCollective& p) {
  return {signed_of(p.all_gather), signed_of(p.reduce_scatter), signed_of(p.all_reduce), signed_of(p.control)};
}

/// By kModelState.
std::array<std::int64_t, 3> values_of(const RunResult::ModelState& state) {
  return {signed_of(state.parameter), signed_of(state.gradient), signed_of(state.optimizer)};
}

/// The strategy, with the wrapping if several are compared, and with the mesh if that has two axes.
std::string full_name(const RunResult& run) {
  if (run.mesh[0] == 1 || run.mesh[1] == 1) return name_of(run);
  const std::string mesh = " " + std::to_string(run.mesh[0]) + "x" + std::to_string(run.mesh[1]);
  return run.strategy + mesh + (run.wrap.empty() ? "" : " " + run.wrap);
}

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
    const RunResult& run = *group[0];
    std::vector<std::string> names;
    for (const RunResult* member : group) names.push_back(name_of(*member));
    const std::string ends = group.size() == 1 ? " ends" : " end bitwise equal";
    html += "<p class=\"verdict" + std::string(groups.size() > 1 ? " differs" : "") + "\">" +
            escape(join(names) + ends) + ": parameters <code>" + escape(run.final_parameters_hash) + "</code>" +
            (run.losses.empty() ? "" : ", last loss " + escape(exact(run.losses.back()))) + "</p>\n";
  }
  return html;
}

/// As a shell reads it.
std::string quoted(const std::string& argument) {
  const bool plain = !argument.empty() && argument.find_first_not_of(
                                              "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
                                              "0123456789_-+=:,./@%") == std::string::npos;
  if (plain) return argument;
  std::string text = "'";
  for (const char c : argument) {
    if (c == '\'')
      text += "'\\''";
    else
      text += c;
  }
  return text + "'";
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
  Table table{"Loss by step", {"step"}, {}};
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
  return "<details><summary>Loss by step</summary>" + to_html(table) + "</details>\n";
}

std::string losses_of(const Comparison& c) {
  std::vector<Curve> all;
  std::vector<Key> keys;
  Table table{"Loss at the first and the last step, and the hash of the final parameters",
              {"strategy", "first", "last", "hash"},
              {}};
  for (const RunResult& run : c.runs) {
    keys.push_back({full_name(run), static_cast<int>(all.size()) % kColors});
    all.push_back({full_name(run), run.losses});
    const bool none = run.losses.empty();
    table.rows.push_back({full_name(run), none ? "" : exact(run.losses.front()), none ? "" : exact(run.losses.back()),
                          run.final_parameters_hash});
  }
  std::vector<std::string> ends = {"step 1"};
  std::size_t longest = 0;
  for (const Curve& curve : all) longest = std::max(longest, curve.values.size());
  if (longest > 1) ends.push_back("step " + std::to_string(longest));
  return "<h2>Loss</h2>\n" +
         paragraph("Global mean loss per step. Curves that lie on each other are drawn one inside the other.") +
         place_for("loss",
                   curves(all, "Loss over steps, one curve per strategy; the table below has the numbers", ends) +
                       legend(keys)) +
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
  for (const RunResult& run : c.runs) {
    const auto state = values_of(run.model_state_bytes);
    const auto total = std::accumulate(state.begin(), state.end(), std::int64_t{0});
    Bar bar{full_name(run), {}, -1, human_bytes(static_cast<double>(total))};
    std::vector<std::string> row = {full_name(run)};
    for (std::size_t i = 0; i < kModelState.size(); ++i) {
      const auto bytes = static_cast<double>(state[i]);
      bar.segments.push_back({bytes, static_cast<int>(i), std::string(kModelState[i]) + ": " + human_bytes(bytes)});
      row.push_back(with_commas(state[i]));
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
  for (std::size_t i = 0; i < kMemoryKinds; ++i) {
    const std::string name(base::name_of(static_cast<base::MemoryCategory>(i)));
    keys.push_back({name, static_cast<int>(i)});
    table.head.push_back(name);
  }
  keys.push_back({"highest sum at one instant", -1});
  for (const RunResult& run : c.runs) {
    const auto total = static_cast<double>(signed_of(run.peak_bytes.total_peak));
    Bar bar{full_name(run), {}, total, human_bytes(total)};
    std::vector<std::string> row = {full_name(run), with_commas(signed_of(run.peak_bytes.total_peak)),
                                    with_commas(signed_of(run.peak_bytes.reserved))};
    for (std::size_t i = 0; i < kMemoryKinds; ++i) {
      const std::int64_t peak = signed_of(run.peak_bytes.peak[i]);
      const auto bytes = static_cast<double>(peak);
      bar.segments.push_back({bytes, static_cast<int>(i), table.head[3 + i] + ": " + human_bytes(bytes)});
      row.push_back(with_commas(peak));
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
  for (const RunResult& run : c.runs) {
    const auto calls = values_of(run.calls_per_step);
    const auto wire = values_of(run.wire_bytes_per_step);
    const auto predicted = values_of(run.formula_bytes_per_step);
    const auto sent = std::accumulate(wire.begin(), wire.end(), std::int64_t{0});
    const auto formula = std::accumulate(predicted.begin(), predicted.end(), std::int64_t{0});
    Bar bar{full_name(run), {}, static_cast<double>(formula), human_bytes(static_cast<double>(sent))};
    for (std::size_t i = 0; i < kCollectives.size(); ++i) {
      const auto bytes = static_cast<double>(wire[i]);
      bar.segments.push_back({bytes, static_cast<int>(i), std::string(kCollectives[i]) + ": " + human_bytes(bytes)});
      if (calls[i] == 0 && wire[i] == 0 && predicted[i] == 0) continue;
      table.rows.push_back({full_name(run), kCollectives[i], with_commas(calls[i]), with_commas(wire[i]),
                            with_commas(predicted[i]), with_commas(wire[i] - predicted[i])});
    }
    all.push_back(bar);
  }
  return "<h2>Communication per step</h2>\n" +
         paragraph(
             "Bytes that a rank sends. Ticks are the formula for each collective: a bar that ends at its tick "
             "sends what the formula says.") +
         place_for("bytes",
                   bars(all, "Bytes sent per step by collective and strategy; the table below has the numbers") +
                       legend(keys)) +
         details("Calls and bytes", table);
}

std::string times_of(const Comparison& c) {
  std::vector<Bar> all;
  Table table{"Milliseconds per step, tokens per second of the whole world, bytes copied between flat buffers per step",
              {"strategy", "median", "p95", "exposed communication", "tokens/s", "copied"},
              {}};
  for (const RunResult& run : c.runs) {
    const double exposed = std::min(run.exposed_communication_ms, run.step_ms_median);
    Bar bar{full_name(run), {}, run.step_ms_p95, significant(run.step_ms_median, 4) + " ms"};
    bar.segments = {
        {run.step_ms_median - exposed, 0, "compute: " + significant(run.step_ms_median - exposed, 4) + " ms"},
        {exposed, 1, "exposed communication: " + significant(exposed, 4) + " ms"}};
    all.push_back(bar);
    table.rows.push_back({full_name(run), significant(run.step_ms_median, 5), significant(run.step_ms_p95, 5),
                          significant(run.exposed_communication_ms, 4),
                          with_commas(std::llround(run.tokens_per_second)),
                          with_commas(signed_of(run.copied_bytes_per_step))});
  }
  const std::vector<Key> keys = {{"compute", 0}, {"exposed communication", 1}, {"95th percentile", -1}};
  return "<h2>Time per step</h2>\n" + bars(all, "Milliseconds per step by strategy; the table below has the numbers") +
         legend(keys) + to_html(table);
}

}  // namespace

std::string command_of(const Comparison& c) {
  if (c.command.empty()) return "";
  std::string line = "tessera";
  for (const std::string& argument : c.command) line += " " + quoted(argument);
  return "<h2>Command</h2>\n<p>The page comes from:</p>\n<pre class=\"scroll\" tabindex=\"0\">" + escape(line) +
         "</pre>\n";
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

std::string document(const std::string& title, std::string body) {
  const bool live = body.find("<script") != std::string::npos;  // the only scripts are data of live pictures
  const std::string style = std::string(kPalette) + kStyle + live_style() + take_styles(body);
  std::string scripts;
  std::string hashes;
  for (const std::string& script : live ? live_scripts() : std::vector<std::string>()) {
    scripts += "<script>" + script + "</script>\n";
    hashes += " " + hash_source(script);
  }
  return "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
         "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; base-uri 'none'; form-action "
         "'none'; "
         "script-src" +
         (live ? hashes : " 'none'") + "; style-src " + hash_source(style) + "\">\n<title>Tessera: " + escape(title) +
         "</title>\n<style>" + style + "</style></head>\n<body>\n" + body + scripts + "</body></html>\n";
}

}  // namespace tessera::tools::report
