#include "tessera/base/optimizer.h"

#include <string>

#include "tessera/base/error.h"

namespace tessera::base {
namespace {

using Kind = OptimizerConfig::Kind;

void require(bool holds, const std::string& what) {
  if (!holds) throw InvalidUsage("optimizer: " + what);
}

bool within(double value, double low, double below) { return value >= low && value < below; }

}  // namespace

OptimizerConfig::Kind parse_optimizer(std::string_view name) {
  for (const Kind kind : {Kind::sgd, Kind::adam, Kind::adamw})
    if (name == name_of(kind)) return kind;
  throw InvalidUsage("unknown optimizer '" + std::string(name) + "'; known: adamw adam sgd");
}

std::string_view name_of(Kind kind) { return kind == Kind::sgd ? "sgd" : kind == Kind::adam ? "adam" : "adamw"; }

void validate(const OptimizerConfig& config) {
  const bool sgd = config.kind == Kind::sgd;
  require(
      within(config.beta1, 0, 1) && within(config.beta2, 0, 1),
      "betas are " + std::to_string(config.beta1) + " and " + std::to_string(config.beta2) + ", need 0 <= beta < 1");
  require(config.eps >= 0, "eps is " + std::to_string(config.eps) + ", needs 0 or more");
  require(config.decay() >= 0, "weight decay is " + std::to_string(config.decay()) + ", needs 0 or more");
  require(config.momentum >= 0, "momentum is " + std::to_string(config.momentum) + ", needs 0 or more");
  require(sgd || config.momentum == 0, "momentum is a setting of sgd; adam and adamw have betas");
  require(sgd || !config.nesterov, "nesterov is a setting of sgd");
  require(!config.nesterov || config.momentum > 0, "nesterov needs a momentum above 0");
  require(!sgd || !config.amsgrad, "amsgrad is a setting of adam and adamw");
}

int state_slots(const OptimizerConfig& config) {
  if (config.kind == Kind::sgd) return config.momentum == 0 ? 0 : 1;
  return config.amsgrad ? 3 : 2;
}

}  // namespace tessera::base
