#include "tessera/nn/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"

namespace tessera::nn {

LrSchedule::Kind parse_schedule(std::string_view name) {
  if (name == "constant") return LrSchedule::Kind::constant;
  if (name == "cosine") return LrSchedule::Kind::cosine;
  throw base::InvalidUsage("unknown schedule '" + std::string(name) + "'; known: constant cosine");
}

void validate(const LrSchedule& schedule) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw base::InvalidUsage("learning rate: " + what);
  };
  require(std::isfinite(schedule.peak) && schedule.peak >= 0,
          "it is " + std::to_string(schedule.peak) + ", needs 0 or more");
  require(schedule.floor >= 0 && schedule.floor <= schedule.peak, "the floor must lie between 0 and the peak");
  require(schedule.warmup >= 0, "the warm-up is " + std::to_string(schedule.warmup) + " steps, needs 0 or more");
}

double learning_rate(const LrSchedule& schedule, std::int64_t step) {
  if (step <= schedule.warmup) return schedule.peak * static_cast<double>(step) / static_cast<double>(schedule.warmup);
  if (schedule.kind == LrSchedule::Kind::constant) return schedule.peak;
  const double length = static_cast<double>(std::max<std::int64_t>(schedule.steps - schedule.warmup, 1));
  const double part = std::min(static_cast<double>(step - schedule.warmup) / length, 1.0);
  return schedule.floor +
         (schedule.peak - schedule.floor) * 0.5 * (1.0 + base::portable::cosine(std::numbers::pi * part));
}

}  // namespace tessera::nn
