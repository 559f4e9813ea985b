// One rank's part of `tessera bench`: times the calls and checks the results.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/device_runtime.h"
#include "tessera/base/stream.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/host_collectives.h"
#include "tools/bench/operations.h"
#include "tools/bench/pattern.h"
#include "tools/cli/link_options.h"

namespace tessera::tools {

/// With --duration or --endless: measures on after the tables.
struct LongRunSpec {
  std::optional<double> seconds;  ///< not set: until it is stopped
  double interval_s = 60;
  double stall_ms = 100;  ///< a call that takes so much longer than its median is a stall
};

struct BenchSpec {
  std::string command;  ///< as it was given, for the JSON
  std::vector<const BenchOp*> ops;
  std::vector<std::string> backends;
  int ranks = 1;
  std::optional<comm::SlowLinks> links;  ///< with --link: of what is timed
  std::uint64_t min_bytes = 8;
  std::uint64_t max_bytes = 64 << 20;
  std::uint64_t factor = 2;
  base::DType dtype = base::DType::f32;
  comm::ReduceOp::Kind redop = comm::ReduceOp::Kind::sum;
  /// Lists of --dtype and --op: an operation has a table for each, if they make one for it; none: `dtype` and `redop`.
  std::vector<std::pair<base::DType, comm::ReduceOp::Kind>> combinations = {};
  int root = 0;
  bool check = false;
  std::string device = "cpu";       ///< memory of this device; as --device
  bool communicator_memory = true;  ///< from Communicator::allocate; else the C library's, or the device's
  std::optional<int> iterations;    ///< per size; not set: many for small messages, few for large ones
  int warmup = 5;
  bool aggregate = false;          ///< time calls back to back, and show their mean
  bool misaligned = false;         ///< buffers begin one element after an aligned address
  bool cold = false;               ///< each timed call starts with its buffers evicted from the caches
  bool overlap = false;            ///< also measure the share of a call that computation hides
  bool only_nccl_columns = false;  ///< print those of nccl-tests alone
  std::optional<LongRunSpec> long_run;
  std::optional<std::chrono::milliseconds> time_limit;  ///< of each call; also shortens points that would take longer
  std::optional<BenchPattern> pattern;                  ///< measured instead of tables
  double outlier = 5;                                   ///< see slow_parts()
  /// Skips a size that the chosen algorithm refuses instead of failing: tuning tries all sizes.
  bool leave_out_refused = false;

  /// min_bytes, times factor, up to max_bytes; {0} for an operation without data.
  std::vector<std::uint64_t> sizes(const BenchOp& op) const;
};

/// Microseconds. A sample is one iteration's time on its slowest rank.
struct BenchTimes {
  double median = 0;
  double p99 = 0;
  double min = 0;
  double max = 0;
};
/// Sorts. p99 is the smallest sample that 99% of the samples do not exceed. Throws InvalidUsage if there are none.
BenchTimes bench_times(std::vector<double> samples);

/// The medians of up to five parts of the samples, in the order of time: rounds of one measurement.
std::vector<double> round_medians(const std::vector<double>& samples);
/// Fewer show no noise.
inline constexpr std::size_t kFewestRounds = 3;

/// One element of "results" in the JSON that --json writes.
struct BenchResult {
  std::string backend;
  std::string op;
  std::uint64_t bytes = 0;
  std::string dtype;
  std::string redop;  ///< "none" if the operation reduces nothing; "": the file doesn't say
  BenchTimes time_us;
  double algbw_gbps = 0;  ///< bytes / median, GB = 1e9
  double busbw_gbps = 0;
  std::optional<std::uint64_t> wrong;  ///< over all ranks; only with --check
  bool in_place = false;
  std::string memory;
  std::string algorithm;
  double bound_us = 0;
  std::vector<double> rounds_us;              ///< round_medians()
  bool noisy = false;                         ///< the rounds disagree, and did when they were measured again
  std::optional<double> overlap_percent;      ///< only with --overlap; absent from the JSON otherwise
  std::optional<double> messages_per_second;  ///< of all pairs, only of windows; absent from the JSON otherwise
};
/// Of one table.
bool same_table(const BenchResult& a, const BenchResult& b);
nlohmann::ordered_json to_json(const BenchResult& result);
BenchResult bench_result_from_json(const nlohmann::ordered_json& json);

/// One line of the table.
struct BenchRow {
  BenchResult out_of_place;
  std::optional<BenchResult> in_place;
};
/// Reads "row", and "in_place" if there is one.
BenchRow bench_row_from_json(const nlohmann::ordered_json& message);

struct BenchCallbacks {
  /// Called on rank 0 with an object that has one of these keys:
  /// "algorithms": the names of Capabilities::algorithms, first; "environment": see gather_environment(); "memcpy":
  /// GB/s of one rank that copies alone, "one_core", and their sum when all copy at once, "all_ranks"; "row": a
  /// BenchRow, see bench_row_from_json(); "pattern": see PatternRunner::run(); "interval": see LongRun::run(); "link":
  /// a comm::Lateness as an array, with links, at the end.
  std::function<void(const nlohmann::ordered_json&)> on_message = {};
  /// Called with each checked output before it is compared: tests corrupt it to prove that the check detects it.
  std::function<void(comm::View out)> before_check = {};
};

/// Collective: every rank calls it with the same plan, whose `backends` is ignored. `device`: its memory is moved.
void run_bench(const BenchSpec& plan, comm::Communicator& world, base::DeviceRuntime& device,
               const BenchCallbacks& callbacks);

struct Repeats {
  int warmup = 0;
  int iterations = 1;
  /// Called before each call, outside its time; may be empty.
  std::function<void()> prepare = {};
};

/// For secondary measurements: as many repeats as a median needs.
inline Repeats fewer(const Repeats& repeats) { return {1, std::clamp(repeats.iterations / 2, 3, 20), repeats.prepare}; }

/// Replaces every sample by that of the slowest rank. Collective.
inline void reduce_to_slowest(comm::HostCollectives& world, std::vector<double>& samples) {
  world.all_reduce(samples.data(), samples.size(), comm::ReduceOp::max(), "bench");
}

/// This rank's microseconds for one call of `body`, which starts after a barrier. Collective.
template <class F>
double time_once(comm::HostCollectives& world, const Repeats& repeats, F&& body) {
  if (repeats.prepare) repeats.prepare();
  world.communicator().barrier().wait();
  const std::int64_t start = base::host_time_ns();
  body();
  return static_cast<double>(base::host_time_ns() - start) * 1e-3;
}

/// The slowest rank's time of each iteration, in microseconds. Collective.
template <class F>
std::vector<double> measure(comm::HostCollectives& world, const Repeats& repeats, F&& body) {
  std::vector<double> samples;
  samples.reserve(static_cast<std::size_t>(repeats.iterations));
  for (int i = -repeats.warmup; i < repeats.iterations; ++i) {
    const double time = time_once(world, repeats, body);
    if (i >= 0) samples.push_back(time);
  }
  reduce_to_slowest(world, samples);
  return samples;
}

/// Arithmetic in registers without calls, so it advances no operation.
class Computation {
 public:
  /// Measures this core's speed.
  Computation();
  /// Computes for about this long.
  void run(double microseconds) const;

 private:
  double rounds_per_microsecond_ = 0;
};

/// Medians over iterations of the slowest rank's time, in microseconds.
struct OverlapTimes {
  double pure = 0;     ///< the operation alone
  double compute = 0;  ///< a computation of the same length alone
  double total = 0;    ///< start of the operation, the same computation, wait for the operation
};

/// The share of an operation's time that computation can hide, by the formula of the OSU micro-benchmarks:
/// max(0, 100 (1 - (total - compute) / pure)): 100 if the computation hides the operation, 0 if the two take as long as
/// one after the other. Noise can raise it above 100.
double overlap_percent(const OverlapTimes& times);

/// Measures the three in turn in every iteration, so that a change of the machine's speed affects all. Collective;
/// `start` starts the operation, `compute` takes about as long.
OverlapTimes measure_overlap(comm::HostCollectives& world, const Repeats& repeats,
                             const std::function<comm::Work()>& start, const std::function<void()>& compute);

}  // namespace tessera::tools
