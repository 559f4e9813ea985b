// Reads and checks compare.json.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools::report {

inline constexpr std::array<const char*, 4> kCollectives = {"all_gather", "reduce_scatter", "all_reduce", "control"};
inline constexpr std::array<const char*, 3> kModelState = {"parameter", "gradient", "optimizer"};
inline constexpr std::array<const char*, 8> kMemoryKinds = {
    "parameter",           "gradient",           "optimizer",     "activation",
    "unsharded_parameter", "unsharded_gradient", "communication", "other"};

struct Run {
  std::string strategy;
  std::string wrap;  ///< if several wrappings are compared
  std::array<int, 2> mesh{1, 1};
  std::vector<double> losses;  ///< NaN for null in the file
  std::string hash;
  double step_median_ms = 0;
  double step_p95_ms = 0;
  double tokens_per_second = 0;
  double exposed_ms = 0;
  std::int64_t copied_bytes = 0;
  std::array<std::int64_t, 4> calls{};  ///< by kCollectives
  std::array<std::int64_t, 4> wire_bytes{};
  std::array<std::int64_t, 4> formula_bytes{};
  std::array<std::int64_t, 3> model_state{};  ///< by kModelState
  std::array<std::int64_t, 8> peak{};         ///< by kMemoryKinds; each is its own maximum
  std::int64_t peak_total = 0;
  std::int64_t peak_reserved = 0;
};

struct Comparison {
  std::string model;
  std::string backend;
  std::string machine;  ///< where it ran; "" if not recorded
  std::int64_t parameters = 0;
  int ranks = 1;
  int steps = 0;
  std::vector<Run> runs;
};

/// Throws InvalidUsage that names `source` and the field if a field is missing or of another type.
Comparison parse_comparison(const nlohmann::json& document, std::string_view source);

/// The strategy, with the wrapping if several are compared.
std::string name_of(const Run& run);
/// The same, with the mesh if that has two axes.
std::string full_name(const Run& run);

/// Groups of runs with the same final parameters and the same losses, bit for bit, in the order of the runs.
std::vector<std::vector<const Run*>> equal_groups(const Comparison& comparison);

}  // namespace tessera::tools::report
