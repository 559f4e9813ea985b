// The options of `tessera bench`, the spec made from them, and what it measures besides operations.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/bench/runner.h"
#include "tools/cli/commands.h"
#include "tools/train/options.h"

namespace tessera::tools {

/// As given on the command line; see the help texts in options.cpp.
struct BenchOptions : LinkOptions {
  BenchSpec spec;  ///< those of its fields that need no conversion
  std::vector<std::string> ops = {"all_reduce", "all_gather", "reduce_scatter"};
  std::optional<int> ranks;
  std::string min_bytes = "8";
  std::string max_bytes = "64M";
  std::string factor = "2";
  std::vector<std::string> dtypes = {"f32"};
  std::vector<std::string> redops;  ///< --op; empty for sum
  std::string root;                 ///< "" for 0
  std::string memory = "communicator";
  bool csv = false;
  bool per_call = false;  ///< the default, said
  std::string json;
  std::string plot;
  std::string report;
  std::string pattern;                                ///< "": tables
  std::string duration, interval, stall, time_limit;  ///< "": not given
  bool endless = false;
  bool pattern_sends = false;  ///< BenchPattern::sends
  std::string tune;
  std::string cluster;
  std::vector<std::string> compare;  ///< two files
  std::string baseline;
  std::string max_slowdown;  ///< "" for 5%; make_bench_plan() checks it
  bool of_step = false;
  StepOptions step;                       ///< with of_step
  std::string only;                       ///< set in the ranks: the backend that this process benchmarks
  std::optional<int> threads;             ///< set in the ranks of --cluster: compute threads of each
  std::optional<std::string> algorithms;  ///< set in the ranks of --tune: as TESSERA_ALGO, "" for the backend's choice
};

/// Adds the options to `command`, which parses them into `options`.
void add_bench_options(CLI::App& command, BenchOptions& options);

inline constexpr const char* kStepGroup = "A training step, with --of-step";

/// Starts this program again as the ranks of a backend, with `more` arguments, and calls `on_message` with each JSON
/// object that they print. Each has cores of its own where there is one for each: ranks that share one wait for each
/// other's turns, which would not measure the transport. Returns the exit code.
int run_ranks(const CommandLine& commands, const BenchSpec& spec, const std::string& backend,
              const std::vector<std::string>& more,
              const std::function<void(const nlohmann::ordered_json&)>& on_message);

/// Checks all options before a rank is started. Throws InvalidUsage: one line with the remedy.
BenchSpec make_bench_plan(const BenchOptions& options, int ranks);

/// bench --cluster: measures this machine and writes it as a cluster file. Starts the ranks, or measures as one of
/// them. Throws InvalidUsage.
int bench_cluster(const CommandLine& commands, const BenchOptions& options, BenchSpec spec);

/// bench --compare: prints what differs between two files of results. Throws InvalidUsage.
int bench_compare(const BenchOptions& options);

/// bench --of-step: what the calls of a training step cost on each backend. As bench_cluster().
int bench_of_step(const CommandLine& commands, const BenchOptions& options, const BenchSpec& spec);

}  // namespace tessera::tools
