// The output of `tessera bench`.
#pragma once

#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "tools/bench/environment.h"
#include "tools/bench/options.h"
#include "tools/bench/runner.h"
#include "tools/cli/output.h"

namespace tessera::tools {

/// What limits an operation, told from measurements of the same run.
struct BenchVerdict {
  std::string backend, op, dtype, redop;
  std::string limit;  ///< "latency", "memory", "link" or "unknown"
  std::string text;   ///< a sentence or two
};

/// Judges the times out of place of one backend and operation; nothing without a size. The limit is "unknown" where the
/// run doesn't show one: `doubt` says what disturbed it, "" for nothing. `link`: between the ranks' hosts, if there are
/// several.
std::optional<BenchVerdict> verdict_of(std::span<const BenchResult> results, int ranks, const std::string& doubt,
                                       const std::optional<NominalLink>& link = {});

/// Collects results and renders them as nccl-tests' table or CSV. Each function returns the text to print immediately.
class BenchReport {
 public:
  BenchReport(const BenchSpec& plan, bool csv) : plan_(plan), csv_(csv) {}

  std::string begin();
  /// A message of the ranks of `backend`; see BenchCallbacks::on_message.
  std::string add(const std::string& backend, const nlohmann::ordered_json& message);
  std::string add(const BenchRow& row);
  std::string end();

  /// `complete`: the run came to its end.
  nlohmann::ordered_json json(bool complete = true) const;
  bool empty() const { return results_.empty() && patterns_.empty(); }
  std::span<const BenchResult> results() const { return results_; }
  /// One line that names what was wrong; "" if nothing was.
  std::string failure() const;
  /// The results as SVG.
  std::string plot() const;

 private:
  std::string setting() const;
  std::string add_environment(const std::string& backend, const nlohmann::ordered_json& environment);
  std::string begin_block(const BenchResult& first);
  std::string end_block();
  std::string doubt() const;

  const BenchSpec& plan_;
  const bool csv_;
  std::vector<BenchResult> results_;
  std::size_t block_begin_ = 0;    ///< index of the first result of the operation and backend being printed
  nlohmann::ordered_json memcpy_;  ///< of the first backend's run; the others' are the same
  nlohmann::ordered_json environment_ = nlohmann::ordered_json::object();  ///< empty before the first is known
  std::vector<BenchVerdict> verdicts_;
  nlohmann::ordered_json intervals_;        ///< lists by backend; null without --duration
  nlohmann::ordered_json patterns_;         ///< null without --pattern
  std::optional<comm::Lateness> lateness_;  ///< of the last backend
};

/// The names, in the order of the results.
std::vector<std::string> backends_in(std::span<const BenchResult> results);

/// Operation, size, and each backend's median out of place, with the best marked. A table whose lines start with #.
std::string side_by_side(std::span<const BenchResult> results);

/// The results as an SVG: latency and bus bandwidth over size, both axes logarithmic. A row for each operation, with a
/// panel for the time and one for busbw; each has a curve per backend, out of place. Operations without sizes (barrier)
/// and values of 0 can't be drawn. `caption` describes the measurement, `machine` the machine.
std::string bench_plot(std::span<const BenchResult> results, const std::string& caption, const std::string& machine);

/// What `--json` writes, with a name where a page shows several.
struct BenchRun {
  std::string name;
  nlohmann::ordered_json json;
};

/// A page with pictures of the runs, laid over each other: times and bus bandwidths over size with their bounds and
/// fits, the rates of patterns, times over a long run, verdicts and environments. Throws nlohmann's errors if a field
/// is missing or has another type.
std::string bench_page(std::span<const BenchRun> runs);

/// bench --report with files in place of operations: measures nothing. Throws InvalidUsage that names a file without
/// results.
int bench_report(const BenchOptions& options);

/// Writes JSON and page; `complete`: the run came to its end.
void write_results(const BenchOptions& options, const BenchReport& report, bool complete);

/// Writes the results and the plot, and throws CheckFailed (exit code 1) if a value was wrong.
void finish_bench(const BenchOptions& options, const BenchReport& report);

}  // namespace tessera::tools
