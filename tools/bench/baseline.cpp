#include "tools/bench/baseline.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/file.h"
#include "tessera/base/json/json_reader.h"
#include "tools/bench/environment.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

auto key_of(const BenchResult& r) { return std::tie(r.backend, r.op, r.bytes, r.dtype, r.memory, r.in_place); }

/// Files of earlier versions don't say.
bool same_reduction(const BenchResult& a, const BenchResult& b) {
  return a.redop == b.redop || a.redop.empty() || b.redop.empty();
}

/// Throws nlohmann's errors if a field is missing or has another type.
BenchFile bench_file(const ordered_json& json) {
  BenchFile file{.ranks = json.at("ranks"), .cold = json.at("cold"), .device = json.value("device", "cpu")};
  for (const ordered_json& result : json.at("results")) file.results.push_back(bench_result_from_json(result));
  file.environment = json.value("environment", ordered_json::object());
  return file;
}

}  // namespace

BenchFile read_bench_file(std::string_view option, const std::string& path) {
  const auto refuse = [&](const std::string& problem) {
    throw base::InvalidUsage(fmt::format("{} '{}': {}", option, path, problem));
  };
  const base::FileText read = base::read_regular(path);
  if (!read.problem.empty()) refuse(read.problem + "; give a file that `tessera bench --json` wrote");
  const auto json = base::parse_json<ordered_json>(read.text, fmt::format("{} '{}'", option, path));
  BenchFile file;
  try {
    file = bench_file(json);
  } catch (const ordered_json::exception&) {
    refuse("is not what `tessera bench --json` writes; give such a file");
  }
  file.path = path;
  for (const BenchResult& r : file.results)
    if (r.rounds_us.size() < kFewestRounds)
      refuse(
          fmt::format("{} of {} bytes has fewer than {} rounds, which don't show its noise; measure it again with "
                      "--iterations {} or more",
                      r.op, r.bytes, kFewestRounds, kFewestRounds));
  if (file.results.empty()) refuse("has no results; give the file of a run that measured some");
  return file;
}

bool RowChange::beyond_noise() const {
  const auto [low, high] = std::ranges::minmax(before.rounds_us);
  const auto [other_low, other_high] = std::ranges::minmax(after.rounds_us);
  return other_low > high || other_high < low;
}

std::vector<RowChange> changes_of(std::span<const BenchResult> before, std::span<const BenchResult> after) {
  std::vector<RowChange> changes;
  for (const BenchResult& now : after)
    for (const BenchResult& then : before)
      if (key_of(now) == key_of(then) && same_reduction(now, then) && then.time_us.median > 0) {
        changes.push_back({then, now});
        break;
      }
  return changes;
}

std::string change_text(const RowChange& change) {
  const BenchResult& r = change.after;
  const double percent = 100 * change.slowdown();
  return fmt::format("{} of {} bytes ({}, {}): {:.2f} -> {:.2f} us, {:.0f} % {}", r.op, r.bytes, r.backend,
                     r.in_place ? "in place" : "out of place", change.before.time_us.median, r.time_us.median,
                     std::abs(percent), percent > 0 ? "slower" : "faster");
}

double parse_slowdown(const std::string& text) {
  if (text.empty()) return 0.05;
  const std::string digits = text.ends_with('%') ? text.substr(0, text.size() - 1) : text;
  double percent = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), percent);
  if (error != std::errc() || end != digits.data() + digits.size() || !(percent >= 0 && percent <= 1000))
    throw base::InvalidUsage("--max-slowdown '" + text + "': give a percentage from 0% to 1000%, such as 5%");
  return percent / 100;
}

BenchFile read_baseline(const BenchOptions& options, const BenchSpec& plan) {
  BenchFile file = read_bench_file("--baseline", options.baseline);
  const auto refuse = [&](const std::string& problem) {
    throw base::InvalidUsage(fmt::format("--baseline '{}' {}", file.path, problem));
  };
  if (file.ranks != plan.ranks)
    refuse(fmt::format("is of {} ranks, not of {}; use --ranks {}", file.ranks, plan.ranks, file.ranks));
  if (file.cold != plan.cold)
    refuse(file.cold ? "was measured with --cold; give it here too" : "was measured without --cold; leave it out");
  if (file.device != plan.device) refuse(fmt::format("was measured with --device {0}; give it here too", file.device));
  const auto measured_here = [&](const BenchResult& r) {
    if (std::ranges::none_of(plan.combinations, [&](const auto& one) {
          return r.dtype == base::name_of(one.first) &&
                 (r.redop.empty() || r.redop == "none" || r.redop == comm::name_of(one.second));
        }))
      return false;
    if (r.memory != (plan.communicator_memory ? "communicator" : "ordinary")) return false;
    const auto op = std::ranges::find(plan.ops, r.op, &BenchOp::name);
    return op != plan.ops.end() && std::ranges::any_of(plan.sizes(**op), [&](std::uint64_t bytes) {
             return bench_shape(**op, bytes, base::parse_dtype(r.dtype), plan.ranks).bytes == r.bytes;
           });
  };
  if (std::ranges::none_of(file.results, measured_here))
    refuse("has no row that this run measures; use its operations, sizes, --dtype and --memory");
  return file;
}

void check_against(const BenchFile& baseline, const BenchOptions& options, const BenchReport& report) {
  const double allowed = parse_slowdown(options.max_slowdown);
  const std::vector<RowChange> changes = changes_of(baseline.results, report.results());
  if (changes.empty())
    throw base::InvalidUsage(
        fmt::format("--baseline '{}' has no row of these backends; use its --backends", baseline.path));
  std::vector<std::string> slower, doubtful;
  for (const RowChange& change : changes)
    if (change.slowdown() > allowed) (change.beyond_noise() ? slower : doubtful).push_back(change_text(change));
  std::string text = fmt::format("#\n# Baseline {}: {} rows compared, {} slower by more than {:g} %\n", baseline.path,
                                 changes.size(), slower.size(), 100 * allowed);
  for (const std::string& line : slower) text += "# slower: " + line + "\n";
  for (const std::string& line : doubtful) text += "# within the noise: " + line + "\n";
  const ordered_json now = report.json().value("environment", ordered_json::object());
  for (const std::string& line : environment_differences(baseline.environment, now))
    text += "# differs: " + line + "\n";
  if (!options.csv) print_now(text);
  if (slower.empty()) return;
  constexpr std::size_t kShown = 8;
  const std::size_t shown = std::min(kShown, slower.size());
  throw CheckFailed(fmt::format("--baseline: {} of {} rows slower by more than {:g} %: {}{}", slower.size(),
                                changes.size(), 100 * allowed,
                                fmt::join(slower.begin(), slower.begin() + static_cast<std::ptrdiff_t>(shown), "; "),
                                slower.size() > shown ? fmt::format("; and {} more", slower.size() - shown) : ""));
}

}  // namespace tessera::tools
