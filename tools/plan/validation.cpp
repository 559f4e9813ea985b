#include "tools/plan/validation.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <set>

#include "tessera/base/error.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr double kLargeError = 0.10;

/// A row that can be predicted. Equal workloads share their step.
struct Candidate {
  const PublishedRow* row;
  std::shared_ptr<const RecordedStep> step;
  std::string metric;
  double per_step = 0;  ///< the metric times (or, for times, divided by) the seconds of a step
  double measured = 0;

  /// The metric of a step that takes so long, and the other way around.
  double value(double seconds) const { return metric == "step_time_s" ? seconds : per_step / seconds; }
};

bool set_metric(Candidate& candidate) {
  const Workload& w = candidate.step->workload();
  const double tokens = static_cast<double>(w.tokens()) * w.microbatches;
  const std::array<std::pair<const char*, double>, 4> metrics = {
      {{"tokens_per_s_per_gpu", tokens},
       {"step_time_s", 1},
       {"samples_per_s", tokens / static_cast<double>(w.seq_len) * w.ranks},
       {"tflops_per_gpu", counted_flops(w) / 1e12}}};
  for (const auto& [key, per_step] : metrics) {
    const std::optional<double> measured = candidate.row->number(key);
    if (!measured) continue;
    candidate.metric = key;
    candidate.per_step = per_step;
    candidate.measured = *measured;
    return true;
  }
  return false;
}

bool has_metric(const PublishedRow& row) {
  return row.number("tokens_per_s_per_gpu") || row.number("step_time_s") || row.number("samples_per_s") ||
         row.number("tflops_per_gpu");
}

/// Why a row can't be predicted by its fields alone; empty: it may be.
std::string beyond(const PublishedRow& row) {
  const std::string precision = row.text("precision"), strategy = row.text("strategy");
  if (row.reach == "no") return row.text("why").empty() ? "out of reach as marked" : row.text("why");
  if (!has_metric(row)) return "no measured rate or time";
  if (!row.reach.empty()) return "";
  if (precision.find("fp8") != std::string::npos) return "kernels of fp8 are not modelled";
  if (precision.starts_with("fp32")) return "kernels of fp32 are not modelled";
  if (row.fields.contains("compile") && row.fields.at("compile").is_boolean() && row.fields.at("compile").get<bool>())
    return "compiled kernels are not modelled";
  for (const char* other : {"tensor", "pipeline", "context parallel", "TP", "PP", "LoRA", "offload"})
    if (strategy.find(other) != std::string::npos) return fmt::format("{} is not modelled", strategy);
  return "";
}

std::optional<double> measured_memory(const PublishedRow& row) {
  constexpr double kGb = 1e9, kGib = 1 << 30;
  for (const char* key : {"mem_active_gib", "mem_gib"})
    if (row.fields.contains(key) && row.fields.at(key).is_number()) return row.fields.at(key).get<double>();
  for (const char* key : {"mem_allocated_gb", "mem_gb"})
    if (row.fields.contains(key) && row.fields.at(key).is_number())
      return row.fields.at(key).get<double>() * kGb / kGib;
  return {};
}

std::string cause_of(const Candidate& candidate, const ValidatedRow& row, bool calibrated) {
  if (std::abs(row.step_error) <= kLargeError) return "";
  const Workload& w = candidate.step->workload();
  if (!row.outlier.empty()) return "marked as an outlier: " + row.outlier;
  if (!calibrated) return "no row calibrates this machine: the software's speed is assumed";
  constexpr double kStateBytes = 16, kFull = 0.4;
  constexpr std::int64_t kWide = 8192;
  const double state = kStateBytes * (w.root_parameters + static_cast<double>(w.model.layers) * w.block_parameters);
  const double used = state / w.shards / w.device->memory_capacity;
  if (w.sharded() && row.step_error < 0 && (used > kFull || w.model.width >= kWide))
    return fmt::format(
        "near the memory limit: the model's state fills {:.0f} % and units are large, so the allocator "
        "may stall",
        100 * used);
  constexpr double kSlowLink = 50e9;
  if (w.ranks > w.ranks_per_host && row.step_error < 0 && w.host_rate < kSlowLink)
    return w.host_rate_stated ? "slow link between hosts" : "slow link between hosts whose rate is not stated";
  if (std::string_view(w.style->name) == "megatron")
    return "host and device need about the same time: which one waits is uncertain";
  std::string details = "details of the software that the row doesn't state";
  for (const char* key : {"why", "loc"})
    if (!candidate.row->text(key).empty()) details += "; " + candidate.row->text(key);
  return details;
}

/// Rows by source and cluster, and their predictions.
class Validator {
 public:
  explicit Validator(const std::vector<PublishedRow>& rows) {
    for (const PublishedRow& row : rows) consider(row);
  }
  Validation run() {
    for (const auto& [key, candidates] : machines_) predict(key, candidates);
    return std::move(result_);
  }

 private:
  using Key = std::pair<std::string, std::string>;

  void consider(const PublishedRow& row) {
    const std::string reason = beyond(row);
    if (!reason.empty()) {
      result_.out_of_reach.emplace_back(row.id, reason);
      return;
    }
    Candidate candidate{.row = &row, .step = nullptr, .metric = {}};
    try {
      candidate.step = std::make_shared<RecordedStep>(workload_of(row));
    } catch (const base::InvalidUsage& error) {
      result_.out_of_reach.emplace_back(row.id, error.what());
      return;
    }
    set_metric(candidate);
    machines_[{row.source, row.cluster}].push_back(candidate);
  }

  void predict(const Key& key, const std::vector<Candidate>& candidates) {
    ValidatedMachine machine{.source = key.first, .cluster = key.second, .calibrated_by = {}, .calibration = {}};
    std::vector<MeasuredStep> measured;
    for (const Candidate& candidate : candidates) {
      if (!candidate.row->calibrates) continue;
      machine.calibrated_by.push_back(candidate.row->id);
      measured.push_back({candidate.step.get(), candidate.value(candidate.measured)});
    }
    machine.calibration = calibrate(candidates.front().step->workload(), measured);
    for (const Candidate& candidate : candidates) {
      const double seconds = candidate.step->seconds(machine.calibration.parameters);
      ValidatedRow row{.id = candidate.row->id,
                       .source = key.first,
                       .cluster = key.second,
                       .reach = candidate.row->reach,
                       .metric = candidate.metric,
                       .calibration = candidate.row->calibrates,
                       .outlier = candidate.row->text("outlier"),
                       .measured = candidate.measured,
                       .predicted = candidate.value(seconds),
                       .step_error = seconds / candidate.value(candidate.measured) - 1,
                       .cause = {},
                       .measured_gib = measured_memory(*candidate.row),
                       .predicted_gib = static_cast<double>(candidate.step->peak_bytes()) / (1 << 30)};
      row.cause = cause_of(candidate, row, !measured.empty());
      result_.rows.push_back(row);
    }
    result_.machines.push_back(machine);
  }

  std::map<Key, std::vector<Candidate>> machines_;
  Validation result_;
};

bool counts(const ValidatedRow& row, const std::string& source, const std::string& reach) {
  return !row.calibration && row.outlier.empty() && (source.empty() || row.source == source) &&
         (row.reach.empty() ? "yes" : row.reach) == reach;
}

std::set<std::string> sources_of(const Validation& validation) {
  std::set<std::string> sources;
  for (const ValidatedRow& row : validation.rows) sources.insert(row.source);
  return sources;
}

std::string line_of(const std::string& name, const std::string& reach, const ErrorSummary& e) {
  return fmt::format("{:<18} {:<8} {:>4} {:>6.1f} {:>7.1f} {:>6.1f} {:>6.1f} {:>+6.1f}\n", name, reach, e.rows,
                     100 * e.mean, 100 * e.median, 100 * e.p90, 100 * e.max, 100 * e.bias);
}

std::string table_text(const Validation& validation) {
  std::string text = "\nerrors in %, of rows that calibrate nothing and are no outliers; bias: of the step's time\n";
  text += fmt::format("{:<18} {:<8} {:>4} {:>6} {:>7} {:>6} {:>6} {:>6}\n", "source", "reach", "rows", "mean", "median",
                      "P90", "max", "bias");
  for (const char* reach : {"yes", "partial"}) {
    for (const std::string& source : sources_of(validation)) {
      const ErrorSummary errors = errors_of(validation, source, reach);
      if (errors.rows > 0) text += line_of(source, reach, errors);
    }
    const ErrorSummary all = errors_of(validation, "", reach);
    if (all.rows > 0) text += line_of("all", reach, all);
  }
  return text;
}

std::string machines_text(const Validation& validation) {
  std::string text = "source, cluster: fitted numbers (calibrating rows)\n";
  for (const ValidatedMachine& machine : validation.machines) {
    const MachineParameters& p = machine.calibration.parameters;
    std::string rows, fitted;
    for (const std::string& row : machine.calibrated_by) rows += (rows.empty() ? "" : ", ") + row;
    for (const std::string& name : machine.calibration.fitted) {
      const double value = name == "products"   ? p.products
                           : name == "memory"   ? p.memory
                           : name == "overhead" ? p.overhead
                           : name == "link"     ? p.link
                                                : p.launch_s;
      fitted += fmt::format(" {} {:.3g}", name, value);
    }
    text += fmt::format("{}, {}:{} ({})\n", machine.source, machine.cluster.empty() ? "no cluster" : machine.cluster,
                        fitted.empty() ? " none" : fitted, rows.empty() ? "no row" : rows);
  }
  return text;
}

ordered_json machine_json(const ValidatedMachine& machine) {
  const MachineParameters& p = machine.calibration.parameters;
  return {{"source", machine.source},
          {"cluster", machine.cluster},
          {"calibrated_by", machine.calibrated_by},
          {"fitted", machine.calibration.fitted},
          {"products", p.products},
          {"memory", p.memory},
          {"launch_s", p.launch_s},
          {"overhead", p.overhead},
          {"link", p.link}};
}

}  // namespace

double ValidatedRow::error() const { return std::abs(predicted / measured - 1); }

Validation validate_rows(const std::vector<PublishedRow>& rows) { return Validator(rows).run(); }

ErrorSummary errors_of(const Validation& validation, const std::string& source, const std::string& reach) {
  std::vector<double> errors;
  ErrorSummary summary;
  for (const ValidatedRow& row : validation.rows) {
    if (!counts(row, source, reach)) continue;
    errors.push_back(row.error());
    summary.mean += row.error();
    summary.bias += row.step_error;
  }
  summary.rows = errors.size();
  if (errors.empty()) return summary;
  std::sort(errors.begin(), errors.end());
  const auto count = static_cast<double>(errors.size());
  summary.mean /= count;
  summary.bias /= count;
  summary.median = errors[errors.size() / 2];
  summary.p90 = errors[static_cast<std::size_t>(std::ceil(0.9 * count)) - 1];
  summary.max = errors.back();
  return summary;
}

std::string to_text(const Validation& validation) {
  std::string text = machines_text(validation) + table_text(validation);
  std::string misses, outliers, memory;
  for (const ValidatedRow& row : validation.rows) {
    if (!row.cause.empty() && !row.calibration)
      (row.outlier.empty() ? misses : outliers) +=
          fmt::format("  {:<40} {:+.1f} %: {}\n", row.id, 100 * row.step_error, row.cause);
    if (row.measured_gib)
      memory += fmt::format("  {:<40} {:>6.1f} {:>8.1f}\n", row.id, row.predicted_gib, *row.measured_gib);
  }
  if (!misses.empty()) text += "\nmisses of more than 10 % of the step's time, with their likely cause\n" + misses;
  if (!outliers.empty()) text += "\noutliers, which are in no figure above\n" + outliers;
  if (!memory.empty())
    text +=
        "\nmemory in GiB for information: the engine's peak, and what the row states (which may include reserves)\n" +
        memory;
  if (!validation.out_of_reach.empty()) text += "\nout of reach, not predicted\n";
  for (const auto& [id, reason] : validation.out_of_reach) text += fmt::format("  {}: {}\n", id, reason);
  return text;
}

ordered_json to_json(const Validation& validation) {
  ordered_json rows = ordered_json::array(), machines = ordered_json::array(), out = ordered_json::array();
  for (const ValidatedRow& row : validation.rows) {
    ordered_json json = {{"id", row.id},         {"measured", row.measured},       {"predicted", row.predicted},
                         {"error", row.error()}, {"calibration", row.calibration}, {"source", row.source},
                         {"metric", row.metric}, {"step_error", row.step_error}};
    if (!row.reach.empty()) json["reach"] = row.reach;
    if (!row.outlier.empty()) json["outlier"] = row.outlier;
    if (!row.cause.empty()) json["cause"] = row.cause;
    rows.push_back(json);
  }
  for (const ValidatedMachine& machine : validation.machines) machines.push_back(machine_json(machine));
  for (const auto& [id, reason] : validation.out_of_reach) out.push_back({{"id", id}, {"reason", reason}});
  ordered_json sources = ordered_json::object();
  for (const std::string& source : sources_of(validation)) {
    const ErrorSummary errors = errors_of(validation, source, "yes");
    if (errors.rows == 0) continue;
    sources[source] = {{"mean_error", errors.mean}, {"p90_error", errors.p90},       {"max_error", errors.max},
                       {"rows", errors.rows},       {"median_error", errors.median}, {"bias", errors.bias}};
  }
  return {{"rows", rows}, {"by_source", sources}, {"fitted", machines}, {"out_of_reach", out}};
}

}  // namespace tessera::tools
