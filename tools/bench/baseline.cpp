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

/// Throws InvalidUsage that names the field if a size or time is out of range, or the environment not of its form.
void check_bench_file(const base::JsonReader& file) {
  constexpr double kLongest = 1e15;  // us
  for (const base::JsonReader& result : file.at("results").elements()) {
    result.at("bytes").integer(0);
    for (const auto& [name, time] : result.at("time_us").members()) time.number(0, kLongest);
    if (result.has("rounds_us"))
      for (const base::JsonReader& round : result.at("rounds_us").elements()) round.number(0, kLongest);
  }
  if (!file.has("environment")) return;
  const base::JsonReader environment = file.at("environment");
  if (environment.has("hosts"))
    for (const base::JsonReader& host : environment.at("hosts").elements()) {
      host.at("name").text();
      host.at("cores").integer(0);
      if (!host.at("load").json().is_null()) host.at("load").number(0, kLongest);
    }
  if (environment.has("backends"))
    for (const base::JsonReader& backend : environment.at("backends").elements()) backend.at("backend").text();
}

/// Throws nlohmann's errors if a field is missing or has another type.
BenchFile bench_file(const ordered_json& json) {
  BenchFile file{.ranks = json.at("ranks"),
                 .cold = json.at("cold"),
                 .aggregate = json.value("timing", "per_call") == "aggregate",
                 .misaligned = json.value("misaligned", false),
                 .device = json.value("device", "cpu")};
  for (const ordered_json& result : json.at("results")) file.results.push_back(bench_result_from_json(result));
  file.environment = json.value("environment", ordered_json::object());
  return file;
}

}  // namespace

void refuse_bench_file(std::string_view option, const std::string& path, const std::string& problem) {
  throw base::InvalidUsage(fmt::format("{} '{}': {}", option, path, problem));
}

BenchFile read_bench_file(std::string_view option, const std::string& path, bool rows) {
  const auto refuse = [&](const std::string& problem) { refuse_bench_file(option, path, problem); };
  const base::FileText read = base::read_regular(path);
  if (!read.problem.empty()) refuse(read.problem + "; give a file that `tessera bench --json` wrote");
  const std::string origin = fmt::format("{} '{}'", option, path);
  auto json = base::parse_json<ordered_json>(read.text, origin);
  BenchFile file;
  try {
    file = bench_file(json);
    const auto checked = base::parse_json<nlohmann::json>(read.text, origin);
    check_bench_file({checked, origin});
  } catch (const ordered_json::exception&) {
    refuse("is not what `tessera bench --json` writes; give such a file");
  }
  file.path = path;
  file.json = std::move(json);
  if (!rows) return file;
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
  for (const auto& [then, now, name] : {std::tuple(file.cold, plan.cold, "--cold"),
                                        {file.aggregate, plan.aggregate, "--aggregate"},
                                        {file.misaligned, plan.misaligned, "--misaligned"}})
    if (then != now)
      refuse(then ? fmt::format("was measured with {}; give it here too", name)
                  : fmt::format("was measured without {}; leave it out", name));
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

namespace {

/// Less than this isn't reported, whatever the rounds say: starts of the same program differ by as much.
constexpr double kSmallestChange = 0.05;

void refuse_other_setting(const BenchFile& before, const BenchFile& after) {
  const auto setting = [](const BenchFile& file) {
    return fmt::format("{} ranks, device {}, caches {}{}{}", file.ranks, file.device, file.cold ? "cold" : "warm",
                       file.aggregate ? ", --aggregate" : "", file.misaligned ? ", --misaligned" : "");
  };
  if (setting(before) != setting(after))
    throw base::InvalidUsage(fmt::format("--compare: '{}' has {}, '{}' has {}; measure both alike", before.path,
                                         setting(before), after.path, setting(after)));
}

ordered_json to_json(const RowChange& change, bool shown) {
  const BenchResult& r = change.after;
  return {{"backend", r.backend},
          {"op", r.op},
          {"bytes", r.bytes},
          {"dtype", r.dtype},
          {"redop", r.redop},
          {"memory", r.memory},
          {"in_place", r.in_place},
          {"before_us", change.before.time_us.median},
          {"after_us", r.time_us.median},
          {"slowdown", change.slowdown()},
          {"verdict", !shown                  ? "within the noise"
                      : change.slowdown() > 0 ? "slower"
                                              : "faster"}};
}

}  // namespace

int bench_compare(const BenchOptions& options) {
  check_outputs({{"--json", options.json}}, options.compare);
  const BenchFile before = read_bench_file("--compare", options.compare.at(0));
  const BenchFile after = read_bench_file("--compare", options.compare.at(1));
  refuse_other_setting(before, after);
  const std::vector<RowChange> changes = changes_of(before.results, after.results);
  if (changes.empty())
    throw base::InvalidUsage(
        fmt::format("--compare: '{}' and '{}' have no row in common; measure the same operations, "
                    "backends and sizes",
                    before.path, after.path));
  std::string rows;
  int slower = 0, faster = 0;
  ordered_json list = ordered_json::array();
  for (const RowChange& change : changes) {
    const bool shown = change.beyond_noise() && std::abs(change.slowdown()) >= kSmallestChange;
    list.push_back(to_json(change, shown));
    if (!shown) continue;
    ++(change.slowdown() > 0 ? slower : faster);
    rows += change_text(change) + "\n";
  }
  const std::vector<std::string> differences = environment_differences(before.environment, after.environment);
  const std::size_t only_before = before.results.size() - changes.size();
  const std::size_t only_after = after.results.size() - changes.size();
  print_clean("# {} -> {}: of {} rows in both {} slower, {} faster, {} within the noise\n{}", before.path, after.path,
              changes.size(), slower, faster, static_cast<int>(changes.size()) - slower - faster, rows);
  if (only_before + only_after > 0)
    print_clean("# {} rows only in the first file, {} only in the second\n", only_before, only_after);
  if (before.environment.empty() || after.environment.empty())
    print_clean("# environment: not compared, since a file has none\n");
  else if (differences.empty())
    print_clean("# environment: no difference\n");
  for (const std::string& line : differences) print_clean("# environment: {}\n", line);
  write_json(options.json, {{"before", before.path},
                            {"after", after.path},
                            {"rows", list},
                            {"only_before", only_before},
                            {"only_after", only_after},
                            {"environment", differences}});
  return 0;
}

}  // namespace tessera::tools
