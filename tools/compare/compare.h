// The results of a comparison, for the table, the JSON and the report.
#pragma once

#include <string>
#include <vector>

#include "tools/compare/run_result.h"

namespace tessera::tools {

struct Comparison {
  std::string model;
  std::int64_t parameters = 0;
  int ranks = 1;
  std::string backend;
  std::int64_t steps = 0;
  std::vector<RunResult> runs;
};

nlohmann::ordered_json to_json(const Comparison& comparison);

/// The table as text.
std::string comparison_table(const Comparison& comparison);

/// "ddp zero1 fsdp end bitwise equal (1a2b..); hsdp differs": which runs share a hash and a loss curve.
std::string equality_statement(const Comparison& comparison);

}  // namespace tessera::tools
