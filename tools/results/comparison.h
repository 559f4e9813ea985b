// The results of a comparison: as compare.json, as a table, and which of its runs are equal.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tools/results/rounds.h"
#include "tools/results/run_result.h"
#include "tools/results/what_if.h"
#include "tools/results/why.h"

namespace tessera::tools {

/// Every run that is compared uses these, so that bytes can be compared with the formulas.
inline constexpr const char* kComparedAlgorithms = "all_reduce=direct,all_gather=direct,reduce_scatter=direct";

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
