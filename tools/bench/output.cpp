#include "tools/bench/output.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "tools/bench/environment.h"
#include "tools/bench/long_run.h"
#include "tools/cli/machine.h"
#include "tools/results/statistics.h"
#include "tools/version.h"

namespace tessera::tools {
namespace {

constexpr int kEnoughPoints = 6;
constexpr double kFitsWell = 0.2;                    // a median error below it
constexpr double kMostly = 0.7;                      // a share of the time that is called the limit
constexpr std::uint64_t kTooSmallToJudge = 1 << 20;  // below, caches and latency take part
constexpr double kEnoughSpan = 1000;                 // a smaller span determines one of the coefficients badly

std::optional<AlphaBetaFit> fit_of(std::span<const BenchResult> results, const BenchResult& like) {
  std::vector<FitPoint> points;
  for (const BenchResult& r : results)
    if (same_table(r, like) && !r.in_place) points.push_back({static_cast<double>(r.bytes), r.time_us.median});
  return fit_alpha_beta(points);
}

/// Over the medians out of place, in the order of the results; without backends and operations with too few sizes.
nlohmann::ordered_json fits_of(std::span<const BenchResult> results) {
  nlohmann::ordered_json fits = nlohmann::ordered_json::array();
  std::vector<const BenchResult*> done;
  for (const BenchResult& r : results) {
    if (std::ranges::any_of(done, [&](const BenchResult* other) { return same_table(*other, r); })) continue;
    done.push_back(&r);
    if (const auto fit = fit_of(results, r))
      fits.push_back({{"backend", r.backend},
                      {"op", r.op},
                      {"dtype", r.dtype},
                      {"redop", r.redop},
                      {"alpha_us", fit->alpha_us},
                      {"beta_us_per_mib", fit->beta_us_per_byte * 0x1p20},
                      {"median_error", fit->median_error},
                      {"worst_error", fit->worst_error},
                      {"points", fit->points}});
  }
  return fits;
}

/// The fit of one backend and operation in a line: "1.23 us + size / 4.56 GB/s, ...". `results` contains only theirs.
std::string fit_line(std::span<const BenchResult> results) {
  if (results.empty()) return "";
  const auto fit = fit_of(results, results.front());
  if (!fit) return fmt::format("none: needs {} sizes or more", kFewestFitPoints);
  std::string text = fmt::format("{:.3g} us", fit->alpha_us);
  if (fit->beta_us_per_byte > 0) text += fmt::format(" + size / {:.3g} GB/s", 1e-3 / fit->beta_us_per_byte);
  text +=
      fmt::format(", off by {:.0f}% in the median, {:.0f}% at worst", 100 * fit->median_error, 100 * fit->worst_error);
  if (fit->points < kEnoughPoints || fit->span < kEnoughSpan)
    text += fmt::format("; uncertain: {} sizes, the largest {:.0f} times the smallest", fit->points, fit->span);
  return text;
}

/// The header of nccl-tests, for the columns that it has.
std::string header(const BenchSpec& plan, bool rate) {
  const std::string more[3] = {"           out-of-place (us)", "      p50      p99      min      max", ""};
  const std::string overlap[3] = {"       out-of-place", "  overlap", "      (%)"};
  const std::string messages[3] = {"", "        msg/s", ""};
  const char* lines[3] = {
      "#                                                              out-of-place                       in-place      "
      "    ",
      "#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  "
      "#wrong",
      "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)  "
      "      "};
  std::string text;
  for (int i = 0; i < 3; ++i)
    text += lines[i] +
            (plan.only_nccl_columns ? ""
             : plan.overlap         ? fmt::format("{:<36}", more[i]) + overlap[i]
             : rate                 ? more[i] + messages[i]
                                    : more[i]) +
            "\n";
  return text;
}

/// A time in the seven columns of nccl-tests: longer times have fewer decimals.
std::string time_text(double microseconds) {
  return fmt::format("{:.{}f}", microseconds, microseconds < 9999.995 ? 2 : microseconds < 99999.95 ? 1 : 0);
}

std::string name_of_table(const BenchResult& r, bool several) {
  return r.op + (several ? " " + r.dtype + (r.redop == "none" ? "" : " " + r.redop) : "");
}

std::string side(const BenchResult* r) {
  if (r == nullptr) return fmt::format("  {:>7}  {:>6}  {:>6}  {:>6}", "N/A", "N/A", "N/A", "N/A");
  return fmt::format("  {:>7}  {:>6.2f}  {:>6.2f}  {:>6}", time_text(r->time_us.median), r->algbw_gbps, r->busbw_gbps,
                     r->wrong ? fmt::to_string(*r->wrong) : "N/A");
}

int root_of(const BenchSpec& plan, const BenchOp& op) { return op.rooted ? plan.root : -1; }

std::string table_line(const BenchSpec& plan, const BenchRow& row) {
  const BenchResult& r = row.out_of_place;
  const BenchOp& op = bench_op(r.op);
  const BenchShape shape = bench_shape(op, r.bytes, base::parse_dtype(r.dtype), plan.ranks);
  const BenchTimes& t = r.time_us;
  const std::string more =
      fmt::format("  {:>7}  {:>7}  {:>7}  {:>7}{}{}", time_text(t.median), time_text(t.p99), time_text(t.min),
                  time_text(t.max), r.overlap_percent ? fmt::format("  {:>7.1f}", *r.overlap_percent) : "",
                  r.messages_per_second ? fmt::format("  {:>11.0f}", *r.messages_per_second) : "");
  return fmt::format("{:>12}  {:>12}  {:>8}  {:>6}  {:>6}{}{}{}\n", r.bytes, shape.count, r.dtype, r.redop,
                     root_of(plan, op), side(&r), side(row.in_place ? &*row.in_place : nullptr),
                     plan.only_nccl_columns ? "" : more);
}

/// A comment for each side whose rounds disagree; "" if they agree.
std::string noise_lines(const BenchRow& row) {
  std::string text;
  for (const BenchResult* r : {&row.out_of_place, row.in_place ? &*row.in_place : nullptr}) {
    if (r == nullptr || !r->noisy) continue;
    const auto [low, high] = std::ranges::minmax(r->rounds_us);
    text += fmt::format("# noisy: {} bytes {}: rounds took {} to {} us, and were measured twice\n", r->bytes,
                        r->in_place ? "in place" : "out of place", time_text(low), time_text(high));
  }
  return text;
}

std::string csv_line(const BenchSpec& plan, const BenchResult& r) {
  const BenchOp& op = bench_op(r.op);
  return fmt::format("{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{},{}\n", r.backend, r.op, plan.ranks,
                     r.bytes, bench_shape(op, r.bytes, base::parse_dtype(r.dtype), plan.ranks).count, r.dtype, r.redop,
                     root_of(plan, op), r.in_place ? "true" : "false", r.memory, r.algorithm, r.time_us.median,
                     r.time_us.p99, r.time_us.min, r.time_us.max, r.algbw_gbps, r.busbw_gbps,
                     r.wrong ? fmt::to_string(*r.wrong) : "", r.bound_us,
                     r.overlap_percent ? fmt::to_string(*r.overlap_percent) : "",
                     r.messages_per_second ? fmt::to_string(*r.messages_per_second) : "");
}

}  // namespace

std::string BenchReport::begin() {
  if (csv_)
    return "backend,op,ranks,bytes,count,dtype,redop,root,in_place,memory,algorithm,median_us,p99_us,min_us,max_us,"
           "algbw_gbps,"
           "busbw_gbps,wrong,bound_us,overlap_percent,messages_per_second\n";
  return fmt::format("# {}, time is the {} the slowest rank's, GB = 1e9 bytes\n", setting(),
                     plan_.aggregate ? "mean of calls back to back," : "median over iterations of");
}

std::string BenchReport::setting() const {
  return fmt::format("tessera {} bench: ranks {}, memory {}{}, caches {}", kVersion, plan_.ranks,
                     plan_.communicator_memory ? "communicator" : "ordinary",
                     (plan_.misaligned ? ", misaligned" : "") + (plan_.device == "cpu" ? "" : " of " + plan_.device),
                     plan_.cold ? "cold (buffers flushed before each call)" : "warm");
}

std::string BenchReport::add(const std::string& backend, const nlohmann::ordered_json& message) {
  if (message.contains("row")) return add(bench_row_from_json(message));
  if (message.contains("environment")) return add_environment(backend, message["environment"]);
  if (message.contains("pattern")) return pattern_text(patterns_.emplace_back(message["pattern"]), doubt());
  if (message.contains("link")) lateness_ = {message["link"][0], message["link"][1], message["link"][2]};
  if (message.contains("memcpy") && memcpy_.is_null()) {
    memcpy_ = message["memcpy"];
    if (!csv_)
      return fmt::format("# memcpy: {:.2f} GB/s by one rank alone, {:.2f} by all at once\n",
                         memcpy_["one_core"].get<double>(), memcpy_["all_ranks"].get<double>());
  }
  if (!message.contains("interval")) return "";
  const std::string before = intervals_.contains(backend) ? "" : end_block() + "#\n";
  block_begin_ = results_.size();
  intervals_[backend].push_back(message["interval"]);
  return before + long_run_line(intervals_[backend]);
}

std::string BenchReport::add_environment(const std::string& backend, const nlohmann::ordered_json& environment) {
  const bool first = environment_.empty();
  if (first)
    environment_ = {{"version", kVersion},
                    {"command", plan_.command},
                    {"hosts", environment.value("hosts", nlohmann::ordered_json::array())},
                    {"backends", nlohmann::ordered_json::array()}};
  nlohmann::ordered_json one = {{"backend", backend}};
  for (const char* part : {"ranks", "libraries"}) one[part] = environment.value(part, nlohmann::ordered_json::array());
  environment_["backends"].push_back(one);
  std::string text;
  if (first && !csv_)
    for (const std::string& line : load_warnings(environment)) text += "# " + line + "\n";
  return text;
}

std::string BenchReport::begin_block(const BenchResult& first) {
  const bool fresh = results_.empty() || !same_table(results_.back(), first);
  if (!fresh) return "";
  const std::string before = end_block();
  block_begin_ = results_.size();
  if (csv_) return "";
  return before + fmt::format("#\n# {}, backend {}\n#\n{}", name_of_table(first, plan_.combinations.size() > 1),
                              first.backend, header(plan_, first.messages_per_second.has_value()));
}

std::string BenchReport::doubt() const {
  if (plan_.links) return "--link slows down what is timed";
  const std::vector<std::string> warnings = load_warnings(environment_);
  return warnings.empty() ? "" : warnings.front();
}

std::string BenchReport::end_block() {
  if (block_begin_ == results_.size()) return "";
  std::uint64_t wrong = 0;
  double speed = 0;
  for (std::size_t i = block_begin_; i < results_.size(); ++i) {
    wrong += results_[i].wrong.value_or(0);
    speed += results_[i].busbw_gbps;
  }
  const std::string checked = plan_.check ? fmt::format("{} {}", wrong, wrong == 0 ? "OK" : "FAILED") : "N/A";
  const auto block = std::span(results_).subspan(block_begin_);
  const std::optional<BenchVerdict> verdict = verdict_of(block, plan_.ranks, doubt(), nominal_link(environment_));
  if (verdict) verdicts_.push_back(*verdict);
  if (csv_) return "";
  return fmt::format("# Out of bounds values : {}\n# Avg bus bandwidth    : {:g}\n# Fit of the time       : {}\n{}",
                     checked, speed / static_cast<double>(results_.size() - block_begin_), fit_line(block),
                     verdict ? "# Verdict               : " + verdict->text + "\n" : "");
}

std::string BenchReport::add(const BenchRow& row) {
  std::string text = begin_block(row.out_of_place);
  results_.push_back(row.out_of_place);
  if (row.in_place) results_.push_back(*row.in_place);
  if (!csv_) return text + table_line(plan_, row) + noise_lines(row);
  text += csv_line(plan_, row.out_of_place);
  return row.in_place ? text + csv_line(plan_, *row.in_place) : text;
}

std::string BenchReport::end() {
  std::string text = end_block();
  if (!csv_ && plan_.backends.size() > 1) text += side_by_side(results_);
  if (!csv_ && lateness_) text += "# " + lateness_line(*lateness_);
  return text;
}

nlohmann::ordered_json BenchReport::json(bool complete) const {
  nlohmann::ordered_json results = nlohmann::ordered_json::array();
  for (const BenchResult& result : results_) results.push_back(to_json(result));
  nlohmann::ordered_json json = {
      {"ranks", plan_.ranks}, {"results", results}, {"fits", fits_of(results_)}, {"cold", plan_.cold}};
  if (!memcpy_.is_null()) json["memcpy_gbps"] = memcpy_;
  if (!environment_.empty()) json["environment"] = environment_;
  json["verdicts"] = nlohmann::ordered_json::array();
  for (const BenchVerdict& v : verdicts_)
    json["verdicts"].push_back({{"backend", v.backend},
                                {"op", v.op},
                                {"dtype", v.dtype},
                                {"redop", v.redop},
                                {"limit", v.limit},
                                {"text", v.text}});
  json["timing"] = plan_.aggregate ? "aggregate" : "per_call";
  json["misaligned"] = plan_.misaligned;
  if (!complete) json["complete"] = false;
  if (!intervals_.is_null())
    json["long_run"] = {
        {"interval_s", plan_.long_run->interval_s}, {"stall_ms", plan_.long_run->stall_ms}, {"intervals", intervals_}};
  if (!patterns_.is_null()) json["patterns"] = patterns_;
  if (plan_.device != "cpu") json["device"] = plan_.device;
  return json;
}

std::string BenchReport::plot() const {
  return bench_plot(results_, fmt::format("{}, {}", setting(), base::name_of(plan_.dtype)), machine_line());
}

std::string BenchReport::failure() const {
  std::uint64_t wrong = 0;
  for (const nlohmann::ordered_json& pattern : patterns_)
    if (pattern.at("wrong").is_number() && pattern["wrong"] > 0)
      return fmt::format("--check: {} wrong values in pattern {} of {} (backend {})",
                         pattern["wrong"].get<std::uint64_t>(), plan_.pattern->name, pattern["op"].get<std::string>(),
                         pattern["backend"].get<std::string>());
  const BenchResult* first = nullptr;
  for (const BenchResult& result : results_) {
    if (result.wrong.value_or(0) == 0) continue;
    if (first == nullptr) first = &result;
    wrong += *result.wrong;
  }
  if (first == nullptr) return "";
  return fmt::format("--check: {} wrong values; the first in {} of {} bytes ({}, backend {}): {}", wrong, first->op,
                     first->bytes, first->in_place ? "in place" : "out of place", first->backend, *first->wrong);
}

std::optional<BenchVerdict> verdict_of(std::span<const BenchResult> results, int ranks, const std::string& doubt,
                                       const std::optional<NominalLink>& link) {
  const BenchResult* largest = nullptr;
  for (const BenchResult& r : results)
    if (!r.in_place && (largest == nullptr || r.bytes > largest->bytes)) largest = &r;
  if (largest == nullptr || largest->bytes == 0 || ranks < 2) return std::nullopt;
  const auto say = [&](const char* limit, const std::string& text) {
    return BenchVerdict{largest->backend, largest->op, largest->dtype, largest->redop, limit, text};
  };
  if (!doubt.empty()) return say("unknown", "what limits isn't known, because the run was disturbed: " + doubt);
  if (largest->noisy)
    return say("unknown", fmt::format("what limits isn't known, because the rounds of {} bytes disagree; use more "
                                      "--iterations, or a host without other programs",
                                      largest->bytes));
  const double us = largest->time_us.median, share = us > 0 ? largest->bound_us / us : 0;
  const std::optional<AlphaBetaFit> fit = fit_of(results, *largest);
  const bool fits = fit && fit->median_error < kFitsWell && fit->points >= kEnoughPoints;
  if (fits && fit->alpha_us > kMostly * us)
    return say("latency", fmt::format("latency limits all of these sizes: {} of the {} us at {} bytes don't "
                                      "depend on the size; join small messages to larger ones",
                                      time_text(std::min(us, fit->alpha_us)), time_text(us), largest->bytes));
  if (link) {
    const double used = largest->busbw_gbps / link->gbps;
    const std::string rate = fmt::format(
        "{} of {} bytes has a bus bandwidth of {:.3g} GB/s, {:.2f} of the {:.3g} that "
        "the link between the hosts is said to have ({})",
        largest->op, largest->bytes, largest->busbw_gbps, used, link->gbps, link->name);
    return used >= kMostly
               ? say("link", rate + ": the link limits it, and only fewer bytes or more interfaces make it much faster")
               : say("unknown", rate + ": --pattern pairs shows what single links reach, and which is slow");
  }
  const std::string moved = fmt::format(
      "{} of {} bytes takes {} us; its loads and stores alone, without waiting for "
      "other ranks, take {}",
      largest->op, largest->bytes, time_text(us), time_text(largest->bound_us));
  if (share >= kMostly && largest->bytes >= kTooSmallToJudge)
    return say("memory", fmt::format("{} ({:.2f} of it): memory limits it, and only fewer bytes make it much faster",
                                     moved, share));
  return say("unknown", fmt::format("{} ({:.2f} of it): {}", moved, share,
                                    share < kMostly ? "memory isn't the limit, and this run doesn't show what is"
                                                    : "so small that this run doesn't show what limits it"));
}

void write_results(const BenchOptions& options, const BenchReport& report, bool complete) {
  if (options.json.empty() && options.report.empty()) return;
  const BenchRun run{"", report.json(complete)};
  write_json(options.json, run.json);
  if (!options.report.empty()) write_file(options.report, bench_page(std::span(&run, 1)));
}

void finish_bench(const BenchOptions& options, const BenchReport& report) {
  write_results(options, report, true);
  if (!options.plot.empty()) write_file(options.plot, report.plot());
  if (const std::string failure = report.failure(); !failure.empty()) throw CheckFailed(failure);
}

std::vector<std::string> backends_in(std::span<const BenchResult> results) {
  std::vector<std::string> names;
  for (const BenchResult& r : results)
    if (std::ranges::find(names, r.backend) == names.end()) names.push_back(r.backend);
  return names;
}

std::string side_by_side(std::span<const BenchResult> results) {
  const std::vector<std::string> backends = backends_in(results);
  std::string text = "#\n# Side by side: median us out of place, * is the best\n#\n";
  const auto another = [&](const BenchResult& r) {
    return std::ranges::any_of(results, [&](const BenchResult& other) {
      return other.op == r.op && (other.dtype != r.dtype || other.redop != r.redop);
    });
  };
  const bool several = std::ranges::any_of(results, another);
  text += fmt::format("# {:<14}  {:>12}", "op", "size");
  for (const std::string& backend : backends) text += fmt::format("  {:>12}", backend);
  text += "\n";
  std::set<std::pair<std::string, std::uint64_t>> done;
  for (const BenchResult& row : results) {
    const std::string table = name_of_table(row, several);
    if (row.in_place || !done.emplace(table, row.bytes).second) continue;
    std::vector<double> us(backends.size(), INFINITY);  // of backends that were not measured
    for (const BenchResult& r : results)
      if (!r.in_place && name_of_table(r, several) == table && r.bytes == row.bytes)
        us[static_cast<std::size_t>(std::ranges::find(backends, r.backend) - backends.begin())] = r.time_us.median;
    text += fmt::format("# {:<14}  {:>12}", table, row.bytes);
    for (const double one : us)
      text += fmt::format("  {:>10}{:>2}", std::isinf(one) ? "-" : fmt::format("{:.2f}", one),
                          one == std::ranges::min(us) ? "*" : "");
    text += "\n";
  }
  return text;
}

}  // namespace tessera::tools
