// bench --compare: what got faster or slower from one file of results to another.
#include <fmt/format.h>

#include <cmath>

#include "tessera/base/error.h"
#include "tools/bench/baseline.h"
#include "tools/bench/environment.h"
#include "tools/bench/modes.h"
#include "tools/cli/output.h"

namespace tessera::tools {
namespace {

/// Less than this isn't reported, whatever the rounds say: starts of the same program differ by as much.
constexpr double kSmallestChange = 0.05;

void refuse_other_setting(const BenchFile& before, const BenchFile& after) {
  const auto setting = [](const BenchFile& file) {
    return fmt::format("{} ranks, device {}, caches {}", file.ranks, file.device, file.cold ? "cold" : "warm");
  };
  if (setting(before) != setting(after))
    throw base::InvalidUsage(fmt::format("--compare: '{}' has {}, '{}' has {}; measure both alike", before.path,
                                         setting(before), after.path, setting(after)));
}

nlohmann::ordered_json to_json(const RowChange& change, bool shown) {
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
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
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
