#include "tools/results/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/results/statistics.h"

namespace tessera::tools {

using nlohmann::ordered_json;

namespace {

using Row = std::vector<std::string>;

Row row_of(const RunResult& r) {
  const auto bytes = [](std::uint64_t value) { return human_bytes(static_cast<double>(value)); };
  const auto& state = r.model_state_bytes;
  Row row = {name_of(r),
             mesh_text(r),
             r.losses.empty() ? "-" : fmt::format("{:.6f}", r.losses.back()),
             bytes(state.parameter),
             bytes(state.gradient),
             bytes(state.optimizer),
             bytes(r.peak_bytes.peak_of(base::MemoryCategory::activation)),
             bytes(r.peak_bytes.total_peak)};
  std::ranges::move(traffic_texts(r), std::back_inserter(row));
  row.insert(row.end(), {fmt::format("{:.1f}", r.step_ms_median), fmt::format("{:.1f}", r.exposed_communication_ms),
                         fmt::format("{:.0f}", r.tokens_per_second)});
  return row;
}

}  // namespace

ordered_json to_json(const Comparison& c) {
  ordered_json runs = ordered_json::array();
  for (const RunResult& run : c.runs) runs.push_back(to_json(run));
  ordered_json json = {{"model", c.model},     {"parameters", c.parameters}, {"ranks", c.ranks},
                       {"backend", c.backend}, {"steps", c.steps},           {"runs", runs}};
  if (!c.products.empty()) json["products"] = c.products;
  if (c.rounds > 1) {
    json["rounds"] = c.rounds;
    json["differences"] = to_json(c.differences);
    json["noise"] = c.noise;
  }
  if (c.why) json["why"] = to_json(*c.why);
  if (c.what_if) json["what_if"] = to_json(*c.what_if);
  return json;
}

Comparison parse_comparison(const nlohmann::json& document, std::string_view source) try {
  const base::JsonReader in(document, "report: '" + std::string(source) + "'");
  Comparison result{.model = in.at("model"),
                    .parameters = in.at("parameters").integer(0),
                    .ranks = static_cast<int>(in.at("ranks").integer(1, kLargestWorld)),
                    .backend = in.at("backend"),
                    .products = "",
                    .steps = in.at("steps").integer(0),
                    .runs = {},
                    .machine = in.value("machine", std::string()),
                    .command = {},
                    .rounds = in.value("rounds", std::size_t{1}),
                    .differences = {},
                    .noise = in.value("noise", std::vector<std::string>()),
                    .why = {},
                    .what_if = {}};
  for (const base::JsonReader& run : in.at("runs").elements()) result.runs.push_back(parse_run_result(run));
  if (result.runs.empty()) in.fail("holds no runs");
  if (in.has("differences")) result.differences = parse_differences(in.at("differences"));
  if (in.has("why")) result.why = parse_why(in.at("why"));
  if (in.has("what_if")) result.what_if = parse_what_if(in.at("what_if"));
  return result;
} catch (const base::InvalidUsage& error) {
  throw base::InvalidUsage(std::string(error.what()) + "; give a file that `tessera compare --json` wrote");
}

std::string comparison_table(const Comparison& c) {
  std::vector<Row> rows = {{"strategy", "mesh", "last loss", "parameters", "gradients", "optimizer", "activations",
                            "peak", "all_gather", "reduce_scatter", "all_reduce", "step ms", "exposed", "tokens/s"}};
  for (const RunResult& run : c.runs) rows.push_back(row_of(run));
  const auto offloaded = [](const RunResult& run) { return run.peak_bytes.peak_of(base::MemoryCategory::offloaded); };
  if (std::any_of(c.runs.begin(), c.runs.end(), [&](const RunResult& run) { return offloaded(run) > 0; })) {
    rows[0].push_back("with the host");
    for (std::size_t i = 0; i < c.runs.size(); ++i)
      rows[i + 1].push_back(human_bytes(static_cast<double>(offloaded(c.runs[i]))));
  }
  if (std::any_of(c.runs.begin(), c.runs.end(), [](const RunResult& run) { return run.skipped_steps > 0U; })) {
    rows[0].push_back("skipped steps");
    for (std::size_t i = 0; i < c.runs.size(); ++i)
      rows[i + 1].push_back(std::to_string(c.runs[i].skipped_steps.value_or(0)));
  }
  const auto compresses = [](const RunResult& run) {
    return run.formula_bytes_per_step.data() != run.plain_bytes_per_step.data();
  };
  if (std::any_of(c.runs.begin(), c.runs.end(), compresses)) {
    rows[0].insert(rows[0].end(), {"all bytes", "formula", "plain"});
    for (std::size_t i = 0; i < c.runs.size(); ++i)
      for (const PerCollective* bytes :
           {&c.runs[i].wire_bytes_per_step, &c.runs[i].formula_bytes_per_step, &c.runs[i].plain_bytes_per_step})
        rows[i + 1].push_back(human_bytes(static_cast<double>(bytes->data())));
  }
  if (!c.runs.empty() && c.runs[0].evaluation) {
    rows[0].push_back("eval loss");
    for (std::size_t i = 0; i < c.runs.size(); ++i)
      rows[i + 1].push_back(fmt::format("{:.6f}", c.runs[i].evaluation.value().loss));
  }
  return fmt::format(
             "{}: {} parameters, {} ranks over {}, {} steps. Memory is per rank; calls / bytes sent are per rank and "
             "step.\n",
             c.model, c.parameters, c.ranks, c.backend, c.steps) +
         text_table(rows);
}

std::vector<std::vector<const RunResult*>> equal_groups(const Comparison& comparison) {
  std::vector<std::vector<const RunResult*>> groups;
  for (const RunResult& run : comparison.runs) {
    const auto equal = [&](const auto& group) {
      return group[0]->final_parameters_hash == run.final_parameters_hash && same_bits(group[0]->losses, run.losses);
    };
    const auto found = std::find_if(groups.begin(), groups.end(), equal);
    if (found != groups.end()) {
      found->push_back(&run);
    } else {
      groups.push_back({&run});
    }
  }
  return groups;
}

std::string equality_statement(const Comparison& comparison) {
  std::string text;
  for (const auto& group : equal_groups(comparison)) {
    std::string names;
    for (const RunResult* run : group) names += (names.empty() ? "" : run->wrap.empty() ? " " : ", ") + name_of(*run);
    if (!text.empty()) text += "; ";
    text += group.size() == 1 ? names + " ends alone"
                              : names + " end bitwise equal: the same losses and the same parameters";
    text += " (" + group[0]->final_parameters_hash + ")";
  }
  return text;
}

}  // namespace tessera::tools
