#include "tools/plan/plan_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "tools/cli/output.h"
#include "tools/report/html.h"
#include "tools/report/live.h"
#include "tools/report/page.h"
#include "tools/report/pictures.h"

namespace tessera::tools {

using report::Bar;
using report::Curve;
using report::Key;
using report::Table;

namespace {

constexpr std::size_t kMemoryKinds = base::kMemoryUses - 1;  // all but `offloaded`

std::string title_of(const StepPlan& step) {
  const RunResult& run = step.result;
  return run.mesh[0] == 1 || run.mesh[1] == 1 ? name_of(run)
                                              : fmt::format("{} {}x{}", name_of(run), run.mesh[0], run.mesh[1]);
}

std::string memory_of(const ModelPlan& plan) {
  std::vector<Bar> bars;
  std::vector<Key> keys;
  Table table{"Bytes of a rank at the peak, by kind", {"strategy", "peak"}, {}};
  for (std::size_t i = 0; i < kMemoryKinds; ++i) {
    const std::string name(base::name_of(static_cast<base::MemoryCategory>(i)));
    keys.push_back({name, static_cast<int>(i)});
    table.head.push_back(name);
  }
  if (plan.memory_bytes > 0) keys.push_back({"memory of a rank", -1});
  for (const StepPlan& step : plan.runs) {
    const auto& peak = step.result.peak_bytes;
    Bar bar{title_of(step),
            {},
            plan.memory_bytes > 0 ? plan.memory_bytes : -1,
            human_bytes(static_cast<double>(peak.total_peak))};
    std::vector<std::string> row = {title_of(step), report::with_commas(static_cast<std::int64_t>(peak.total_peak))};
    for (std::size_t i = 0; i < kMemoryKinds; ++i) {
      const auto bytes = static_cast<double>(peak.at_peak[i]);
      bar.segments.push_back({bytes, static_cast<int>(i), table.head[2 + i] + ": " + human_bytes(bytes)});
      row.push_back(report::with_commas(static_cast<std::int64_t>(peak.at_peak[i])));
    }
    bars.push_back(bar);
    table.rows.push_back(row);
  }
  return "<h2>Memory of a rank at the peak</h2>\n" +
         report::bars(bars, "Bytes at the peak by kind and strategy; the table below has the numbers") +
         report::legend(keys) + to_html(table);
}

std::string times_of(const ModelPlan& plan) {
  std::vector<Bar> bars;
  Table table{"Milliseconds per step, tokens per second of all ranks, and model FLOPs utilization",
              {"strategy", "step", "exposed communication", "tokens/s", "MFU", "bytes sent by a rank"},
              {}};
  for (const StepPlan& step : plan.runs) {
    const RunResult& run = step.result;
    const double exposed = std::min(run.exposed_communication_ms, run.step_ms_median);
    Bar bar{title_of(step), {}, -1, report::significant(run.step_ms_median, 4) + " ms"};
    bar.segments = {
        {run.step_ms_median - exposed, 0, "compute: " + report::significant(run.step_ms_median - exposed, 4) + " ms"},
        {exposed, 1, "exposed communication: " + report::significant(exposed, 4) + " ms"}};
    bars.push_back(bar);
    const PerCollective& sent = run.wire_bytes_per_step;
    table.rows.push_back(
        {title_of(step), report::significant(run.step_ms_median, 5), report::significant(exposed, 4),
         report::with_commas(static_cast<std::int64_t>(run.tokens_per_second)),
         step.mfu ? fmt::format("{:.1f}%", 100 * *step.mfu) : "-",
         report::with_commas(static_cast<std::int64_t>(sent.all_gather + sent.reduce_scatter + sent.all_reduce))});
  }
  return "<h2>Time of a step</h2>\n" +
         report::bars(bars, "Milliseconds per step by strategy; the table below has the numbers") +
         report::legend({{"compute", 0}, {"exposed communication", 1}}) + to_html(table);
}

std::string curves_of(const std::vector<ModelPlan>& plans, const std::string& title) {
  std::map<std::string, Curve> by_name;
  Table table{title + ": tokens per second and rank", {"strategy"}, {}};
  for (const ModelPlan& plan : plans) {
    table.head.push_back(fmt::format("{} ranks", plan.ranks));
    for (const StepPlan& step : plan.runs) by_name[name_of(step.result)].name = name_of(step.result);
  }
  for (auto& [name, curve] : by_name) {
    std::vector<std::string> row = {name};
    for (const ModelPlan& plan : plans) {
      const auto found = std::find_if(plan.runs.begin(), plan.runs.end(), [&, wanted = name](const StepPlan& step) {
        return name_of(step.result) == wanted;
      });
      const double value = found == plan.runs.end() ? std::numeric_limits<double>::quiet_NaN()
                                                    : found->result.tokens_per_second / plan.ranks;
      curve.values.push_back(value);
      row.push_back(found == plan.runs.end() ? "-" : report::significant(value, 5));
    }
    table.rows.push_back(row);
  }
  std::vector<std::string> ends = {table.head.at(1)};
  if (plans.size() > 1) ends.push_back(table.head.back());
  std::vector<Curve> curves;
  std::vector<Key> keys;
  for (auto& [name, curve] : by_name) {
    keys.push_back({name, static_cast<int>(curves.size())});
    curves.push_back(std::move(curve));
  }
  return "<h2>" + report::escape(title) + "</h2>\n" +
         report::curves(curves, "Tokens per second and rank over the worlds of the table below", ends) +
         report::legend(keys) + to_html(table);
}

std::string advice_of(const Advice& advice) {
  std::vector<Bar> bars;
  Table table{"The fastest for their memory", {"options", "peak", "step ms", "tokens/s"}, {}};
  for (const Candidate& one : advice.pareto) {
    bars.push_back({one.command_line(),
                    {{one.peak_bytes(), 0, human_bytes(one.peak_bytes())}},
                    advice.memory_bytes > 0 ? advice.memory_bytes : -1,
                    report::significant(one.step_ms(), 4) + " ms"});
    table.rows.push_back({one.command_line(), human_bytes(one.peak_bytes()), report::significant(one.step_ms(), 5),
                          report::with_commas(static_cast<std::int64_t>(one.plan.result.tokens_per_second))});
  }
  std::string html = "<h2>Memory against time</h2>\n<p class=\"verdict\">" +
                     report::escape("Take " + advice.pareto.back().command_line()) + "</p>\n";
  for (const std::string& reason : advice.reasons) html += "<p>" + report::escape(reason) + "</p>\n";
  std::vector<Key> keys = {{"peak of a rank", 0}};
  if (advice.memory_bytes > 0) keys.push_back({"memory of a rank", -1});
  return html + report::bars(bars, "Peak of a rank, by rising memory and falling time; the table has the numbers") +
         report::legend(keys) + to_html(table);
}

}  // namespace

std::string plan_page(const ModelPlan& plan, const std::optional<Scaling>& scaling, const std::optional<Advice>& advice,
                      const std::optional<Why>& why) {
  const std::string title =
      fmt::format("{} on {} rank{} of {}", plan.model, plan.ranks, plan.ranks == 1 ? "" : "s", plan.cluster);
  std::string body = "<h1>" + report::escape(title) + "</h1>\n<p class=\"soft\">" +
                     report::escape(report::with_commas(plan.parameters) + " parameters; simulated") + "</p>\n";
  if (advice) body += advice_of(*advice);
  body += memory_of(plan) + times_of(plan);
  if (scaling) {
    body += curves_of(scaling->weak, "Weak scaling");
    if (!scaling->strong.empty()) body += curves_of(scaling->strong, "Strong scaling");
  }
  if (why) {
    const Comparison terms{.why = why};
    body += "<section>\n" + report::picture_data(terms) + report::gap_pictures(terms) + "</section>\n";
  }
  return report::document(title, body);
}

}  // namespace tessera::tools
