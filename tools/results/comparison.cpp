#include "tools/results/comparison.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "tessera/base/error.h"
#include "tools/cli/output.h"

namespace tessera::tools {

using nlohmann::ordered_json;

namespace {

using Row = std::vector<std::string>;

Row row_of(const RunResult& r) {
  const auto& state = r.model_state_bytes;
  Row row = {name_of(r),
             mesh_text(r),
             r.losses.empty() ? "-" : fmt::format("{:.6f}", r.losses.back()),
             human_bytes(state.parameter),
             human_bytes(state.gradient),
             human_bytes(state.optimizer),
             human_bytes(r.peak_bytes.peak_of(base::MemoryCategory::activation)),
             human_bytes(r.peak_bytes.total_peak)};
  std::ranges::move(traffic_texts(r), std::back_inserter(row));
  row.insert(row.end(), {fmt::format("{:.1f}", r.step_ms_median), fmt::format("{:.1f}", r.exposed_communication_ms),
                         fmt::format("{:.0f}", r.tokens_per_second)});
  return row;
}

WhatIf parse_what_if(const base::JsonReader& json) {
  WhatIf w{.machine = json.at("machine"),
           .flops = json.at("flops"),
           .parameter_bytes = json.at("parameter_bytes"),
           .link_given = json.at("link_given")};
  const base::JsonReader setting = json.at("setting");
  constexpr int kMost = 1 << 20;
  w.setting = {link_at(setting.at("link")), link_at(setting.at("intra")),
               static_cast<int>(setting.at("ranks").integer(1, kMost)),
               static_cast<int>(setting.at("hosts").integer(1, kMost)), setting.at("sequences").integer(1)};
  w.seq_len = json.at("seq_len").integer(1);
  w.microbatches = json.at("microbatches").integer(1);
  w.most_sequences = json.at("most_sequences").integer(1);
  w.command = json.at("command").get<std::vector<std::string>>();
  for (const base::JsonReader& run : json.at("runs").elements())
    w.runs.push_back({run.at("name"), run.at("strategy"), run.at("measured_ms"), run.at("simulated_ms"),
                      run.at("schedules").json(), run.at("memory_known"), run.at("left_out")});
  return w;
}

}  // namespace

ordered_json to_json(const WhatIf& w) {
  ordered_json runs = ordered_json::array();
  for (const WhatIf::Run& run : w.runs)
    runs.push_back({{"name", run.name},
                    {"strategy", run.strategy},
                    {"measured_ms", run.measured_ms},
                    {"simulated_ms", run.simulated_ms},
                    {"memory_known", run.memory_known},
                    {"left_out", run.left_out},
                    {"schedules", run.schedules}});
  return {{"machine", w.machine},
          {"flops", w.flops},
          {"parameter_bytes", w.parameter_bytes},
          {"link_given", w.link_given},
          {"setting",
           {{"link", link_json(w.setting.link)},
            {"intra", link_json(w.setting.intra)},
            {"ranks", w.setting.ranks},
            {"hosts", w.setting.hosts},
            {"sequences", w.setting.sequences}}},
          {"seq_len", w.seq_len},
          {"microbatches", w.microbatches},
          {"most_sequences", w.most_sequences},
          {"command", w.command},
          {"runs", runs}};
}

ordered_json to_json(const Comparison& c) {
  ordered_json json = {
      {"model", c.model}, {"parameters", c.parameters},
      {"ranks", c.ranks}, {"backend", c.backend},
      {"steps", c.steps}, {"runs", each_of(c.runs, [](const RunResult& run) { return to_json(run); })}};
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
                    .steps = in.at("steps").integer(0),
                    .machine = in.value("machine", std::string()),
                    .rounds = in.value("rounds", std::size_t{1}),
                    .noise = in.value("noise", std::vector<std::string>())};
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
  const auto any = [&](const auto& has) { return std::ranges::any_of(c.runs, has); };
  const auto add_column = [&](const char* name, const auto& text_of) {
    rows[0].emplace_back(name);
    for (std::size_t i = 0; i < c.runs.size(); ++i) rows[i + 1].push_back(text_of(c.runs[i]));
  };
  if (any([](const RunResult& run) { return run.calls_per_step.send > 0; }))
    add_column("send", [](const RunResult& run) {
      return traffic_text(run.calls_per_step.send, run.wire_bytes_per_step.send);
    });
  const auto offloaded = [](const RunResult& run) { return run.peak_bytes.peak_of(base::MemoryCategory::offloaded); };
  if (any([&](const RunResult& run) { return offloaded(run) > 0; }))
    add_column("with the host", [&](const RunResult& run) { return human_bytes(offloaded(run)); });
  if (any([](const RunResult& run) { return run.skipped_steps > 0U; }))
    add_column("skipped steps", [](const RunResult& run) { return std::to_string(run.skipped_steps.value_or(0)); });
  if (any([](const RunResult& run) { return run.formula_bytes_per_step.data() != run.plain_bytes_per_step.data(); }))
    for (const auto& [name, bytes] : {std::pair("all bytes", &RunResult::wire_bytes_per_step),
                                      {"formula", &RunResult::formula_bytes_per_step},
                                      {"plain", &RunResult::plain_bytes_per_step}})
      add_column(name, [of = bytes](const RunResult& run) { return human_bytes((run.*of).data()); });
  if (!c.runs.empty() && c.runs[0].evaluation)
    add_column("eval loss", [](const RunResult& run) { return fmt::format("{:.6f}", run.evaluation.value().loss); });
  return fmt::format(
             "{}: {} parameters, {} ranks over {}, {} steps. Memory is per rank; calls / bytes sent are per rank and "
             "step.\n",
             c.model, c.parameters, c.ranks, c.backend, c.steps) +
         text_table(rows);
}

std::vector<std::vector<const RunResult*>> equal_groups(const Comparison& comparison) {
  std::vector<std::vector<const RunResult*>> groups;
  for (const RunResult& run : comparison.runs) {
    auto found = std::ranges::find_if(groups, [&](const auto& group) { return ends_alike(*group[0], run); });
    if (found == groups.end()) found = groups.insert(found, std::vector<const RunResult*>());
    found->push_back(&run);
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
