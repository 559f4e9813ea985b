#include "tools/plan/calibration.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tessera::tools {
namespace {

constexpr double kMeasurementSpread = 0.05;  // of the logarithm of a measured time, from leave-one-out errors

/// A number that can be fitted: its spread is that of its logarithm.
struct Fitted {
  const char* name;
  double MachineParameters::*value;
  double spread, low, high;
};
constexpr Fitted kProducts{"products", &MachineParameters::products, 0.08, 0.45, 1};
constexpr Fitted kMemory{"memory", &MachineParameters::memory, 0.12, 0.6, 1.15};
constexpr Fitted kLaunch{"launch_s", &MachineParameters::launch_s, 0.4, 3e-6, 8e-5};
constexpr Fitted kOverhead{"overhead", &MachineParameters::overhead, 0.5, 0.1, 4};
constexpr Fitted kLink{"link", &MachineParameters::link, 0.25, 0.05, 0.97};

double squared(double value) { return value * value; }

/// The parameters of highest posterior probability, by coordinate descent from the prior.
class Descent {
 public:
  Descent(const MachineParameters& prior, const std::vector<MeasuredStep>& measured, std::vector<Fitted> fitted)
      : prior_(prior), measured_(measured), fitted_(std::move(fitted)), best_(prior) {}

  double run() {
    cost_ = cost(best_);
    std::vector<double> steps;
    for (const Fitted& number : fitted_) steps.push_back(number.spread / 2);
    constexpr int kRounds = 80;
    constexpr double kSmallest = 1e-3;
    for (int round = 0; round < kRounds; ++round) {
      bool moved = false;
      for (std::size_t i = 0; i < fitted_.size(); ++i) moved = move(fitted_[i], steps[i]) || moved;
      if (moved) continue;
      for (double& step : steps) step /= 2;
      if (*std::max_element(steps.begin(), steps.end()) < kSmallest) break;
    }
    return cost_;
  }
  const MachineParameters& best() const { return best_; }

 private:
  double cost(const MachineParameters& parameters) const {
    double sum = 0;
    for (const MeasuredStep& one : measured_)
      sum += squared(std::log(one.step->seconds(parameters) / one.seconds) / kMeasurementSpread);
    for (const Fitted& number : fitted_)
      sum += squared(std::log(parameters.*number.value / (prior_.*number.value)) / number.spread);
    return sum;
  }
  bool move(const Fitted& number, double step) {
    constexpr double kImprovement = 1e-9;
    for (const double sign : {1.0, -1.0}) {
      MachineParameters tried = best_;
      tried.*number.value = std::clamp(best_.*number.value * std::exp(sign * step), number.low, number.high);
      const double value = cost(tried);
      if (value >= cost_ - kImprovement) continue;
      cost_ = value;
      best_ = tried;
      return true;
    }
    return false;
  }

  const MachineParameters prior_;
  const std::vector<MeasuredStep>& measured_;
  const std::vector<Fitted> fitted_;
  MachineParameters best_;
  double cost_ = 0;
};

}  // namespace

MachineParameters prior_of(const Workload& workload) {
  return {.products = workload.device->product_prior, .launch_s = workload.launch_prior_s};
}

Calibration calibrate(const Workload& workload, const std::vector<MeasuredStep>& measured) {
  const MachineParameters prior = prior_of(workload);
  if (measured.empty()) return {prior, {}};
  std::vector<std::vector<Fitted>> choices = {{kProducts, kMemory}};
  if (measured.size() > 1)
    choices = {{kProducts, kMemory, kOverhead}, {kProducts, kMemory, kLaunch}, {kProducts, kMemory, kLink}};
  constexpr double kWorthwhile = 0.1;  // a later choice must be better by this much
  double best = HUGE_VAL;
  Calibration result;
  for (const std::vector<Fitted>& choice : choices) {
    Descent descent(prior, measured, choice);
    const double cost = descent.run();
    if (cost >= best - kWorthwhile) continue;
    best = cost;
    result.parameters = descent.best();
    result.fitted.clear();
    for (const Fitted& number : choice) result.fitted.emplace_back(number.name);
  }
  return result;
}

}  // namespace tessera::tools
