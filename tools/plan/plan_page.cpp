#include "tools/plan/plan_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "tools/cli/output.h"
#include "tools/pages/page.h"

namespace tessera::tools {

using nlohmann::ordered_json;
using pages::full_name;
using pages::significant;
using pages::Table;

namespace {

std::string memory_of(const ModelPlan& plan) {
  const std::vector<std::string> kinds = pages::device_memory_kinds();
  Table table{"Bytes of a rank at the peak, by kind", {"strategy", "peak"}, {}};
  table.head.insert(table.head.end(), kinds.begin(), kinds.end());
  ordered_json rows = ordered_json::array();
  for (const StepPlan& step : plan.runs) {
    const base::MemoryTracker::Snapshot& peak = step.result.peak_bytes;
    const std::vector<std::uint64_t> bytes(peak.at_peak.begin(), peak.at_peak.begin() + std::ssize(kinds));
    rows.push_back({full_name(step.result), bytes, plan.memory_bytes, peak.total_peak});
    std::vector<std::string>& row = table.rows.emplace_back(1, full_name(step.result));
    row.push_back(with_commas(peak.total_peak));
    for (const std::uint64_t value : bytes) row.push_back(with_commas(value));
  }
  return "<h2>Memory of a rank at the peak</h2>\n" +
         pages::chart("bars", {{"label", "Bytes at the peak by kind and strategy; the table below has the numbers"},
                               {"unit", "bytes"},
                               {"keys", kinds},
                               {"mark", plan.memory_bytes > 0 ? "memory of a rank" : ""},
                               {"rows", rows}}) +
         to_html(table);
}

std::string times_of(const ModelPlan& plan) {
  Table table{"Milliseconds per step, tokens per second of all ranks, and model FLOPs utilization",
              {"strategy", "step", "exposed communication", "tokens/s", "MFU", "bytes sent by a rank"},
              {}};
  ordered_json rows = ordered_json::array();
  for (const StepPlan& step : plan.runs) {
    const RunResult& run = step.result;
    rows.push_back(pages::step_bar(full_name(run), run));
    table.rows.push_back({full_name(run), significant(run.step_ms_median, 5),
                          significant(std::min(run.exposed_communication_ms, run.step_ms_median), 4),
                          with_commas(static_cast<std::int64_t>(run.tokens_per_second)),
                          step.mfu ? fmt::format("{:.1f}%", 100 * *step.mfu) : "-",
                          with_commas(run.wire_bytes_per_step.data())});
  }
  return "<h2>Time of a step</h2>\n" +
         pages::chart("bars", {{"label", "Milliseconds per step by strategy; the table below has the numbers"},
                               {"unit", "ms"},
                               {"keys", {"compute", "exposed communication"}},
                               {"rows", rows}}) +
         to_html(table);
}

std::string curves_of(const std::vector<ModelPlan>& plans, const std::string& title) {
  std::map<std::string, std::vector<double>> by_name;  // tokens per second and rank in each world, or NaN
  Table table{title + ": tokens per second and rank", {"strategy"}, {}};
  for (std::size_t i = 0; i < plans.size(); ++i) {
    table.head.push_back(fmt::format("{} ranks", plans[i].ranks));
    for (const StepPlan& step : plans[i].runs) {
      std::vector<double>& values = by_name[name_of(step.result)];
      values.resize(plans.size(), std::numeric_limits<double>::quiet_NaN());
      values[i] = step.result.tokens_per_second / plans[i].ranks;
    }
  }
  ordered_json lines = ordered_json::array();
  for (const auto& [name, values] : by_name) {
    lines.push_back({{"name", name}, {"values", values}});
    std::vector<std::string>& row = table.rows.emplace_back(1, name);
    for (const double value : values) row.push_back(std::isnan(value) ? "-" : significant(value, 5));
  }
  const std::vector<std::string> marks(table.head.begin() + 1, table.head.end());
  return "<h2>" + pages::escape(title) + "</h2>\n" +
         pages::chart("lines", {{"label", "Tokens per second and rank over the worlds of the table below"},
                                {"marks", marks},
                                {"lines", lines}}) +
         to_html(table);
}

std::string advice_of(const Advice& advice) {
  Table table{"The fastest for their memory", {"options", "peak", "step ms", "tokens/s"}, {}};
  ordered_json rows = ordered_json::array();
  for (const Candidate& one : advice.pareto) {
    rows.push_back(
        {one.command_line(), {one.peak_bytes()}, advice.memory_bytes, significant(one.step_ms(), 4) + " ms"});
    table.rows.push_back({one.command_line(), human_bytes(one.peak_bytes()), significant(one.step_ms(), 5),
                          with_commas(static_cast<std::int64_t>(one.plan.result.tokens_per_second))});
  }
  std::string html = "<h2>Memory against time</h2>\n<p class=\"verdict\">" +
                     pages::escape("Take " + advice.pareto.back().command_line()) + "</p>\n";
  for (const std::string& reason : advice.reasons) html += "<p>" + pages::escape(reason) + "</p>\n";
  return html +
         pages::chart("bars",
                      {{"label", "Peak of a rank, by rising memory and falling time; the table has the numbers"},
                       {"unit", "bytes"},
                       {"keys", ordered_json::array({"peak of a rank"})},
                       {"mark", advice.memory_bytes > 0 ? "memory of a rank" : ""},
                       {"rows", rows}}) +
         to_html(table);
}

}  // namespace

std::string plan_page(const ModelPlan& plan, const std::optional<Scaling>& scaling, const std::optional<Advice>& advice,
                      const std::optional<Why>& why) {
  const std::string title =
      fmt::format("{} on {} rank{} of {}", plan.model, plan.ranks, plan.ranks == 1 ? "" : "s", plan.cluster);
  std::string body = "<h1>" + pages::escape(title) + "</h1>\n<p class=\"soft\">" +
                     pages::escape(with_commas(plan.parameters) + " parameters; simulated") + "</p>\n";
  if (advice) body += advice_of(*advice);
  body += memory_of(plan) + times_of(plan);
  if (scaling) {
    body += curves_of(scaling->weak, "Weak scaling");
    if (!scaling->strong.empty()) body += curves_of(scaling->strong, "Strong scaling");
  }
  if (why) {
    const Comparison terms{.why = why};
    body += "<section>\n" + pages::picture_data(terms) + pages::gap_pictures(terms) + "</section>\n";
  }
  return pages::document(title, body);
}

}  // namespace tessera::tools
