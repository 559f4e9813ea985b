// One run as in compare.json. The names are fixed: programs outside this repository read them.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/json/json_reader.h"
#include "tessera/base/memory_tracker.h"
#include "tessera/comm/slow_link/slow_link.h"
#include "tessera/fsdp/engine_stats.h"
#include "tools/cli/quantities.h"
#include "tools/results/step_timeline.h"

namespace tessera::tools {

/// Of a run: as for --ranks of plan.
inline constexpr int kLargestWorld = 1 << 20;

/// The names of PerCollective's values.
inline constexpr std::array kCollectives = {"all_gather", "reduce_scatter", "all_reduce", "control", "send"};

template <class T>
struct PerCollective {
  T all_gather = 0;
  T reduce_scatter = 0;
  T all_reduce = 0;
  T control = 0;
  T send = 0;  ///< of programs; the engine sends no messages
  T data() const { return all_gather + reduce_scatter + all_reduce + send; }  ///< without control
  std::array<T, kCollectives.size()> values() const { return {all_gather, reduce_scatter, all_reduce, control, send}; }
};
using Calls = PerCollective<double>;  ///< in a step: a fraction where replicas synchronize in some steps only
using Bytes = PerCollective<std::uint64_t>;

/// The mean loss over a whole file.
struct Evaluation {
  double loss = 0;
  std::int64_t tokens = 0;
};

struct RunResult {
  using Unit = fsdp::UnitStats;
  struct ModelState {
    std::uint64_t parameter = 0;
    std::uint64_t gradient = 0;
    std::uint64_t optimizer = 0;
    std::uint64_t total() const { return parameter + gradient + optimizer; }
  };
  std::string strategy;
  std::string wrap;  ///< if several wrappings are compared
  std::array<int, 2> mesh = {1, 1};
  std::vector<Unit> units;
  std::vector<double> losses;
  std::string final_parameters_hash;
  std::optional<Evaluation> evaluation;        ///< of the final parameters, if --eval was given
  std::optional<std::uint64_t> skipped_steps;  ///< of f16: steps whose gradients overflowed
  bool replayed = false;                       ///< the steps, as a device graph
  double step_ms_median = 0;
  double step_ms_p95 = 0;
  double tokens_per_second = 0;
  double exposed_communication_ms = 0;
  std::vector<double> round_step_ms;  ///< the median step of each round, if there are several
  std::vector<int> unequal_rounds;    ///< those, from 1, that did not end as the first one did
  std::uint64_t copied_bytes_per_step = 0;
  Calls calls_per_step;
  Bytes wire_bytes_per_step, formula_bytes_per_step;
  Bytes plain_bytes_per_step;  ///< the formula if `plain` ran all collectives
  ModelState model_state_bytes;
  base::MemoryTracker::Snapshot peak_bytes;
  std::optional<comm::Lateness> link;    ///< with --link
  std::optional<LinkSpec> link_fit;      ///< of real links, with --why
  std::optional<StepParts> parts;        ///< means over the ranks and steps, without the first two; with --why
  std::optional<StepTimeline> timeline;  ///< of the step of median length, with --report
};

nlohmann::ordered_json to_json(const RunResult::ModelState& state);
nlohmann::ordered_json link_json(const LinkSpec& link);
LinkSpec link_at(const base::JsonReader& json);  ///< reads what link_json() wrote. Throws InvalidUsage

/// The strategy, with the wrapping if several are compared.
std::string name_of(const RunResult& result);

/// The same as a part of a file's name.
std::string trace_name(const RunResult& result);

/// "2x4"
std::string mesh_text(const RunResult& result);

/// "12", or "0.1": the calls of a step, on average.
std::string calls_text(double calls);
/// The calls and the bytes sent in a step: "12 / 3.4 MB", or "-" without calls.
std::string traffic_text(double calls, std::uint64_t bytes);
/// Of each collective.
std::vector<std::string> traffic_texts(const RunResult& result);

nlohmann::ordered_json to_json(const RunResult& result);
/// Reads what to_json() wrote. Throws InvalidUsage that names the field that is missing or out of range.
RunResult parse_run_result(const base::JsonReader& json);

}  // namespace tessera::tools
