#include "tools/results/run_result.h"

#include <fmt/format.h>

#include <cmath>

#include "tools/cli/output.h"

namespace tessera::tools {

using base::JsonReader;
using nlohmann::ordered_json;

namespace {

/// Milliseconds, tokens in a second: within what whole numbers of 64 bits hold.
double measure_at(const JsonReader& json) { return json.number(0, 1e15); }

/// A whole number without a decimal point.
ordered_json figure(double value) {
  const auto whole = static_cast<std::uint64_t>(value);
  return static_cast<double>(whole) == value ? ordered_json(whole) : ordered_json(value);
}
ordered_json figure(std::uint64_t value) { return value; }

template <class T>
ordered_json to_json(const PerCollective<T>& p) {
  ordered_json json;
  for (std::size_t i = 0; i + (p.send > 0 ? 0U : 1U) < kCollectives.size(); ++i)
    json[kCollectives[i]] = figure(p.values()[i]);
  return json;
}

Bytes bytes_at(const JsonReader& json) {
  return {json.at("all_gather"), json.at("reduce_scatter"), json.at("all_reduce"), json.at("control"),
          json.value("send", std::uint64_t{0})};
}

Calls calls_at(const JsonReader& json) {
  const auto of = [&](const char* collective) { return json.at(collective).number(0, 1e15); };
  return {of("all_gather"), of("reduce_scatter"), of("all_reduce"), of("control"), json.has("send") ? of("send") : 0};
}

ordered_json to_json(const base::MemoryTracker::Snapshot& peak) {
  ordered_json json = {{"total", peak.total_peak}, {"reserved", peak.reserved}};
  for (std::size_t i = 0; i < base::kMemoryUses; ++i) {
    const auto use = static_cast<base::MemoryCategory>(i);
    if (use != base::MemoryCategory::offloaded || peak.peak[i] > 0)
      json[std::string(base::name_of(use))] = peak.peak[i];
  }
  return json;
}

base::MemoryTracker::Snapshot peak_from(const JsonReader& json) {
  base::MemoryTracker::Snapshot peak;
  peak.total_peak = json.at("total");
  peak.reserved = json.at("reserved");
  for (std::size_t i = 0; i < base::kMemoryUses; ++i) {
    const auto use = static_cast<base::MemoryCategory>(i);
    const std::string name(base::name_of(use));
    peak.peak[i] = use == base::MemoryCategory::offloaded ? json.value(name, std::uint64_t{0})
                                                          : json.at(name).get<std::uint64_t>();
  }
  return peak;
}

}  // namespace

ordered_json to_json(const RunResult::ModelState& state) {
  return {{"parameter", state.parameter}, {"gradient", state.gradient}, {"optimizer", state.optimizer}};
}

ordered_json link_json(const LinkSpec& link) {
  return {{"latency_us", link.latency_us}, {"bytes_per_second", link.bytes_per_second}};
}

LinkSpec link_at(const JsonReader& json) {
  return {json.at("latency_us").number(0, 1e15), json.at("bytes_per_second").number(0, 1e30)};
}

std::string name_of(const RunResult& r) { return r.wrap.empty() ? r.strategy : r.strategy + " " + r.wrap; }

std::string trace_name(const RunResult& r) {
  std::string name = r.strategy;
  for (const char c : r.wrap.empty() ? "" : "." + r.wrap) name += c == '/' || c == ';' ? '_' : c;
  return name;
}

std::string mesh_text(const RunResult& r) { return fmt::format("{}x{}", r.mesh[0], r.mesh[1]); }

std::string calls_text(double calls) {
  const double whole = std::round(calls);
  return whole == calls ? with_commas(static_cast<std::uint64_t>(whole)) : fmt::format("{:.3g}", calls);
}

std::string traffic_text(double calls, std::uint64_t bytes) {
  return calls == 0 && bytes == 0 ? "-" : fmt::format("{} / {}", calls_text(calls), human_bytes(bytes));
}

std::vector<std::string> traffic_texts(const RunResult& r) {
  const Calls& calls = r.calls_per_step;
  const Bytes& bytes = r.wire_bytes_per_step;
  return {traffic_text(calls.all_gather, bytes.all_gather), traffic_text(calls.reduce_scatter, bytes.reduce_scatter),
          traffic_text(calls.all_reduce, bytes.all_reduce)};
}

ordered_json to_json(const RunResult& r) {
  ordered_json units = ordered_json::array();
  for (const RunResult::Unit& unit : r.units)
    units.push_back({{"name", unit.name},
                     {"elements", unit.elements},
                     {"padding", unit.padding},
                     {"kept_after_forward", unit.kept_after_forward},
                     {"peak_bytes", unit.peak_bytes}});
  ordered_json json = {
      {"strategy", r.strategy},
      {"mesh", r.mesh},
      {"units", units},
      {"losses", r.losses},
      {"final_parameters_hash", r.final_parameters_hash},
      {"step_ms", {{"median", r.step_ms_median}, {"p95", r.step_ms_p95}}},
      {"tokens_per_second", r.tokens_per_second},
      {"exposed_communication_ms", r.exposed_communication_ms},
      {"copied_bytes_per_step", r.copied_bytes_per_step},
      {"calls_per_step", to_json(r.calls_per_step)},
      {"wire_bytes_per_step", to_json(r.wire_bytes_per_step)},
      {"formula_bytes_per_step", to_json(r.formula_bytes_per_step)},
      {"plain_bytes_per_step", to_json(r.plain_bytes_per_step)},
      {"model_state_bytes", to_json(r.model_state_bytes)},
      {"peak_bytes", to_json(r.peak_bytes)},
  };
  if (!r.round_step_ms.empty()) json["step_ms"]["rounds"] = r.round_step_ms;
  if (!r.unequal_rounds.empty()) json["unequal_rounds"] = r.unequal_rounds;
  if (!r.wrap.empty()) json["wrap"] = r.wrap;
  if (r.link)
    json["link"] = {
        {"woke_late_us", r.link->median_us}, {"late_percent", r.link->percent}, {"shared_calls", r.link->shared_calls}};
  if (r.link_fit) json["link_fit"] = link_json(*r.link_fit);
  if (r.parts) json["parts_ms"] = to_json(*r.parts);
  if (r.timeline) json["timeline"] = to_json(*r.timeline);
  if (r.skipped_steps) json["skipped_steps"] = *r.skipped_steps;
  if (r.replayed) json["graphs"] = true;
  if (r.evaluation) {
    json["eval_loss"] = r.evaluation->loss;
    json["eval_tokens"] = r.evaluation->tokens;
  }
  return json;
}

RunResult parse_run_result(const JsonReader& json) {
  RunResult r;
  r.strategy = json.at("strategy").text();
  r.wrap = json.value("wrap", std::string());
  r.mesh[0] = static_cast<int>(json.at("mesh").at(0).integer(1, kLargestWorld));
  r.mesh[1] = static_cast<int>(json.at("mesh").at(1).integer(1, kLargestWorld / r.mesh[0]));
  if (json.has("units"))
    for (const JsonReader& unit : json.at("units").elements())
      r.units.push_back({.name = unit.at("name"),
                         .elements = unit.at("elements").integer(0),
                         .padding = unit.at("padding").integer(0),
                         .kept_after_forward = unit.value("kept_after_forward", false),
                         .peak_bytes = unit.value("peak_bytes", std::size_t{0})});
  for (const JsonReader& loss : json.at("losses").elements()) r.losses.push_back(loss.number_or_nan());
  r.final_parameters_hash = json.at("final_parameters_hash").text();
  r.step_ms_median = measure_at(json.at("step_ms").at("median"));
  r.step_ms_p95 = measure_at(json.at("step_ms").at("p95"));
  r.tokens_per_second = measure_at(json.at("tokens_per_second"));
  r.exposed_communication_ms = measure_at(json.at("exposed_communication_ms"));
  r.copied_bytes_per_step = json.at("copied_bytes_per_step");
  r.calls_per_step = calls_at(json.at("calls_per_step"));
  r.wire_bytes_per_step = bytes_at(json.at("wire_bytes_per_step"));
  for (const char* formula : {"formula_bytes_per_step", "plain_bytes_per_step"})  // the second where the first differs
    if (json.has(formula)) r.plain_bytes_per_step = bytes_at(json.at(formula));
  if (json.has("formula_bytes_per_step")) r.formula_bytes_per_step = bytes_at(json.at("formula_bytes_per_step"));
  const JsonReader state = json.at("model_state_bytes");
  r.model_state_bytes = {state.at("parameter"), state.at("gradient"), state.at("optimizer")};
  r.peak_bytes = peak_from(json.at("peak_bytes"));
  if (json.has("eval_loss")) r.evaluation = {json.at("eval_loss").number_or_nan(), json.at("eval_tokens").integer(0)};
  if (json.has("link")) {
    const JsonReader link = json.at("link");
    r.link = {link.at("woke_late_us"), link.at("late_percent"), link.at("shared_calls")};
  }
  if (json.has("link_fit")) r.link_fit = link_at(json.at("link_fit"));
  if (json.has("parts_ms")) r.parts = parse_step_parts(json.at("parts_ms"));
  if (json.has("timeline")) r.timeline = parse_timeline(json.at("timeline"));
  if (json.has("skipped_steps")) r.skipped_steps = json.at("skipped_steps").get<std::uint64_t>();
  r.replayed = json.value("graphs", false);
  return r;
}

}  // namespace tessera::tools
