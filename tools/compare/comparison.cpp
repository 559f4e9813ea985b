#include "tools/compare/comparison.h"

#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tools/cli/output.h"
#include "tools/cli/statistics.h"
#include "tools/cli/text_table.h"

namespace tessera::tools {

using nlohmann::ordered_json;

namespace {

using Json = nlohmann::json;

/// An object of the file with its location in it, for messages.
class Reader {
 public:
  Reader(const Json& value, std::string place) : value_(value), place_(std::move(place)) {
    if (!value_.is_object()) fail("is not an object");
  }

  bool has(const char* name) const { return value_.contains(name); }
  const Json& at(const char* name) const {
    const auto found = value_.find(name);
    if (found == value_.end()) fail(std::string("has no '") + name + "'");
    return *found;
  }
  template <class T>
  T number(const char* name) const {
    const Json& value = at(name);
    if (!value.is_number()) fail(std::string("'") + name + "' is not a number");
    return value.get<T>();
  }
  std::string text(const char* name) const {
    const Json& value = at(name);
    if (!value.is_string()) fail(std::string("'") + name + "' is not a string");
    return value.get<std::string>();
  }
  Reader object(const char* name) const { return {at(name), place_ + " " + name}; }
  const Json& list(const char* name) const {
    const Json& value = at(name);
    if (!value.is_array()) fail(std::string("'") + name + "' is not an array");
    return value;
  }
  std::uint64_t count(const char* name) const { return static_cast<std::uint64_t>(number<std::int64_t>(name)); }
  [[noreturn]] void fail(const std::string& what) const {
    throw base::InvalidUsage(place_ + " " + what + "; give a file that `tessera compare --json` wrote");
  }

 private:
  const Json& value_;
  std::string place_;
};

PerCollective per_collective(const Reader& in) {
  return {in.count("all_gather"), in.count("reduce_scatter"), in.count("all_reduce"), in.count("control")};
}

base::MemoryTracker::Snapshot parse_peak(const Reader& in) {
  base::MemoryTracker::Snapshot peak;
  for (std::size_t i = 0; i < base::kMemoryUses; ++i) {
    const auto use = static_cast<base::MemoryCategory>(i);
    if (use != base::MemoryCategory::offloaded) peak.peak[i] = in.count(std::string(base::name_of(use)).c_str());
  }
  peak.total_peak = in.count("total");
  peak.reserved = in.count("reserved");
  return peak;
}

RunResult parse_run(const Reader& in) {
  RunResult run;
  run.strategy = in.text("strategy");
  if (in.has("wrap")) run.wrap = in.text("wrap");
  const Json& mesh = in.list("mesh");
  if (mesh.size() != 2 || !mesh[0].is_number_integer() || !mesh[1].is_number_integer())
    in.fail("'mesh' is not two numbers");
  run.mesh = {mesh[0].get<int>(), mesh[1].get<int>()};
  if (in.has("units"))
    for (const Json& value : in.list("units")) {
      const Reader unit(value, "a unit");
      run.units.push_back(
          {unit.text("name"), unit.number<std::int64_t>("elements"), unit.number<std::int64_t>("padding")});
    }
  for (const Json& loss : in.list("losses")) {
    if (!loss.is_number() && !loss.is_null()) in.fail("'losses' holds a value that is not a number");
    run.losses.push_back(number_or_nan(loss));
  }
  run.final_parameters_hash = in.text("final_parameters_hash");
  const Reader times = in.object("step_ms");
  run.step_ms_median = times.number<double>("median");
  run.step_ms_p95 = times.number<double>("p95");
  run.tokens_per_second = in.number<double>("tokens_per_second");
  run.exposed_communication_ms = in.number<double>("exposed_communication_ms");
  run.copied_bytes_per_step = in.count("copied_bytes_per_step");
  run.calls_per_step = per_collective(in.object("calls_per_step"));
  run.wire_bytes_per_step = per_collective(in.object("wire_bytes_per_step"));
  run.formula_bytes_per_step = per_collective(in.object("formula_bytes_per_step"));
  const Reader state = in.object("model_state_bytes");
  run.model_state_bytes = {state.count("parameter"), state.count("gradient"), state.count("optimizer")};
  run.peak_bytes = parse_peak(in.object("peak_bytes"));
  return run;
}

using Row = std::vector<std::string>;

std::uint64_t sum_of(const PerCollective& bytes) { return bytes.all_gather + bytes.reduce_scatter + bytes.all_reduce; }

std::string calls_and_bytes(std::uint64_t calls, std::uint64_t bytes) {
  return calls == 0 ? "-" : fmt::format("{} / {}", calls, human_bytes(static_cast<double>(bytes)));
}

Row row_of(const RunResult& r) {
  const auto bytes = [](std::uint64_t value) { return human_bytes(static_cast<double>(value)); };
  const auto& state = r.model_state_bytes;
  return {name_of(r),
          fmt::format("{}x{}", r.mesh[0], r.mesh[1]),
          r.losses.empty() ? "-" : fmt::format("{:.6f}", r.losses.back()),
          bytes(state.parameter),
          bytes(state.gradient),
          bytes(state.optimizer),
          bytes(r.peak_bytes.peak_of(base::MemoryCategory::activation)),
          bytes(r.peak_bytes.total_peak),
          calls_and_bytes(r.calls_per_step.all_gather, r.wire_bytes_per_step.all_gather),
          calls_and_bytes(r.calls_per_step.reduce_scatter, r.wire_bytes_per_step.reduce_scatter),
          calls_and_bytes(r.calls_per_step.all_reduce, r.wire_bytes_per_step.all_reduce),
          fmt::format("{:.1f}", r.step_ms_median),
          fmt::format("{:.1f}", r.exposed_communication_ms),
          fmt::format("{:.0f}", r.tokens_per_second)};
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

Comparison parse_comparison(const nlohmann::json& document, std::string_view source) {
  const Reader in(document, "report: '" + std::string(source) + "'");
  Comparison result;
  result.model = in.text("model");
  result.backend = in.text("backend");
  result.parameters = in.number<std::int64_t>("parameters");
  result.ranks = in.number<int>("ranks");
  result.steps = in.number<std::int64_t>("steps");
  if (document.contains("machine")) result.machine = in.text("machine");
  const nlohmann::json& runs = in.list("runs");
  for (std::size_t i = 0; i < runs.size(); ++i)
    result.runs.push_back(parse_run({runs[i], "report: '" + std::string(source) + "': run " + std::to_string(i)}));
  if (result.runs.empty()) in.fail("holds no runs");
  try {
    result.rounds = document.value("rounds", std::size_t{1});
    result.noise = document.value("noise", result.noise);
    if (document.contains("differences")) result.differences = parse_differences(document.at("differences"));
    for (std::size_t i = 0; i < runs.size(); ++i)
      if (runs[i].contains("timeline")) result.runs[i].timeline = report::parse_timeline(runs[i].at("timeline"));
    if (document.contains("why")) result.why = parse_why(document.at("why"));
    if (document.contains("what_if")) result.what_if = report::parse_what_if(document.at("what_if"));
  } catch (const std::exception&) {  // nlohmann's, or an index out of range
    in.fail("'rounds', 'differences', 'noise', 'why', 'what_if' or 'timeline' is not what compare writes");
  }
  return result;
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
    return sum_of(run.formula_bytes_per_step) != sum_of(run.plain_bytes_per_step);
  };
  if (std::any_of(c.runs.begin(), c.runs.end(), compresses)) {
    rows[0].insert(rows[0].end(), {"all bytes", "formula", "plain"});
    for (std::size_t i = 0; i < c.runs.size(); ++i)
      for (const PerCollective* bytes :
           {&c.runs[i].wire_bytes_per_step, &c.runs[i].formula_bytes_per_step, &c.runs[i].plain_bytes_per_step})
        rows[i + 1].push_back(human_bytes(static_cast<double>(sum_of(*bytes))));
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
