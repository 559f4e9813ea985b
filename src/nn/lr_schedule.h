// Learning-rate schedules.
#pragma once

#include <cstdint>
#include <string_view>

#include "tessera/base/export.h"

namespace tessera::nn {

/// Learning rate by step, where s is the step (from 1), W the warm-up and N the total number of steps:
///   warm-up, s <= W:  peak * s / W
///   constant, s > W:  peak
///   cosine,   s > W:  floor + (peak - floor) * (1 + cos(pi * (s - W) / (N - W))) / 2, which reaches `floor` in step N
struct LrSchedule {
  /// The course after the warm-up.
  enum class Kind : std::uint8_t { constant, cosine };
  Kind kind = Kind::constant;  ///< default: constant
  double peak = 1e-3;          ///< the highest rate, reached at the end of the warm-up
  double floor = 0.0;          ///< the rate that cosine reaches in its last step
  std::int64_t warmup = 0;     ///< warmup in steps; 0: none
  std::int64_t steps = 0;      ///< steps in total; required by cosine
};

/// "constant", "cosine". Throws InvalidUsage.
TESSERA_API LrSchedule::Kind parse_schedule(std::string_view name);
/// Throws InvalidUsage for values that are out of range.
TESSERA_API void validate(const LrSchedule& schedule);
/// The rate of step `step`; steps after the last one keep its rate.
TESSERA_API double learning_rate(const LrSchedule& schedule, std::int64_t step);

}  // namespace tessera::nn
