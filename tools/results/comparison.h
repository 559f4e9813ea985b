// The results of a comparison: as compare.json, as a table, and which of its runs are equal.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/results/rounds.h"
#include "tools/results/run_result.h"
#include "tools/results/why.h"

namespace tessera::tools {

/// Every run that is compared uses these, so that bytes can be compared with the formulas.
inline constexpr const char* kComparedAlgorithms = "all_reduce=direct,all_gather=direct,reduce_scatter=direct";

/// What the steps of a comparison would take over other links, on other ranks and with other batches: schedules that a
/// page replays.
struct WhatIf {
  struct Run {
    std::string name, strategy;
    double measured_ms = 0;
    double simulated_ms = 0;           ///< in the setting of the run; 0 if it is left out
    nlohmann::ordered_json schedules;  ///< by ranks and hosts, for the script of the page
    bool memory_known = true;          ///< false: it does not grow in proportion to the tokens
    std::string left_out;              ///< why there are none; "" if there are
  };
  /// Where the sliders begin.
  struct Setting {
    LinkSpec link;   ///< between all ranks, or between hosts
    LinkSpec intra;  ///< inside hosts, if there are several
    int ranks = 1, hosts = 1;
    std::int64_t sequences = 1;  ///< of a rank's microbatch
  };
  std::string machine;         ///< what a rank computes, as plan --machine takes it: the compute that was measured
  double flops = 0;            ///< of that machine
  double parameter_bytes = 0;  ///< of one that is unsharded; 0 if plug-ins compress it
  bool link_given = true;      ///< with --link; else the setting's link is plan's
  Setting setting;
  std::int64_t seq_len = 1, microbatches = 1, most_sequences = 1;
  std::vector<std::string> command;  ///< of plan, without what the sliders choose; empty if it can't do the same
  std::vector<Run> runs;
};

struct Comparison {
  std::string model;
  std::int64_t parameters = 0;
  int ranks = 1;
  std::string backend;
  std::string products;  ///< "own" or "library"; "" on devices without a choice
  std::int64_t steps = 0;
  std::vector<RunResult> runs;
  std::string machine;               ///< where it ran; "" if not recorded
  std::vector<std::string> command;  ///< arguments of the program; empty if not recorded
  std::size_t rounds = 1;
  std::vector<Difference> differences;  ///< of all pairs of runs, if there are several rounds
  std::vector<std::string> noise;       ///< what made their times uncertain
  std::optional<Why> why;               ///< with --why
  std::optional<WhatIf> what_if;        ///< with --report
};

nlohmann::ordered_json to_json(const WhatIf& what_if);
nlohmann::ordered_json to_json(const Comparison& comparison);

/// Reads what pages show; the rest keeps its defaults. Throws InvalidUsage that names `source` and the field if a field
/// is missing or of another type.
Comparison parse_comparison(const nlohmann::json& document, std::string_view source);

/// The table as text.
std::string comparison_table(const Comparison& comparison);

/// Groups of runs with the same final parameters and the same losses, bit for bit, in the order of the runs.
std::vector<std::vector<const RunResult*>> equal_groups(const Comparison& comparison);

/// "ddp zero1 fsdp end bitwise equal (1a2b..); hsdp differs": the groups in one line.
std::string equality_statement(const Comparison& comparison);

}  // namespace tessera::tools
