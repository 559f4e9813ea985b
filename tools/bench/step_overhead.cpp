#include "tools/bench/step_overhead.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/plan/step_plan.h"
#include "tools/results/statistics.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

constexpr int kModels = 4;        ///< the first ones of calibration_steps(), from small to large
constexpr double kWork = 1.2e10;  ///< of a training, in parameters times tokens
constexpr int kFewestSteps = 8;   // unless --iterations asks for less
constexpr int kRounds = 3;        ///< of all trainings, since a disturbance lasts for longer than some of them

/// The training of a calibration model. Its text is this program: any file will do, and this one can be read even if it
/// was replaced since it started.
TrainPlan training_of(const CalibrationStep& one, int ranks, const ComputeMeasurement& measurement) {
  TrainOptions options;
  options.model = "gpt-nano";
  options.steps = 0;
  options.global_batch = one.step.samples * ranks;
  TrainPlan plan = make_plan(options, ranks);
  plan.model = one.model;
  plan.seq_len = one.seq_len;
  plan.threads = measurement.threads;
  plan.ranks_per_host = ranks;
  const auto work = static_cast<double>(nn::parameter_count(plan.model) * one.step.samples * one.seq_len);
  plan.options.steps = std::min(std::max(static_cast<int>(kWork / work), kFewestSteps), measurement.most_steps);
  plan.schedule.steps = plan.options.steps;
  plan.data = std::make_shared<const nn::TokenDataset>(std::vector<std::string>{"/proc/self/exe"}, nn::TokenFormat::any,
                                                       plan.model.vocabulary);
  return plan;
}

std::vector<std::string> strategies_for(int ranks) {
  std::vector<std::string> all = {"ddp", "zero1", "fsdp"};
  if (ranks >= 4 && ranks % 2 == 0) all.emplace_back("hsdp");
  return all;
}

/// Times of one training in each round.
struct TrainingRounds {
  std::string strategy;
  TrainPlan plan;
  std::vector<double> step_ms, exposed_ms;
};

std::vector<std::vector<TrainingRounds>> trainings_of(int ranks, const ComputeMeasurement& measurement) {
  std::vector<CalibrationStep> models = calibration_steps(measurement.threads);
  models.resize(kModels);
  std::vector<std::vector<TrainingRounds>> all;
  for (const CalibrationStep& one : models) {
    all.emplace_back();
    for (const std::string& strategy : strategies_for(ranks))
      all.back().push_back({strategy, training_of(one, ranks, measurement), {}, {}});
  }
  return all;
}

StepSample sample_of(const TrainingRounds& training, const SimulatedCluster& cluster) {
  const RunResult planned = plan_step(training.plan, training.strategy, cluster).result;
  return {training.strategy, median(training.step_ms), planned.step_ms_median,
          median(training.exposed_ms) - planned.exposed_communication_ms};
}

}  // namespace

StepOverhead fit_step_overhead(const std::vector<std::vector<StepSample>>& models) {
  StepOverhead overhead;
  std::vector<double> late;
  for (const std::vector<StepSample>& samples : models) {
    std::vector<double> simulated, ratios;
    for (const StepSample& one : samples) {
      overhead.steps[one.strategy].emplace_back(one.simulated_ms, one.measured_ms);
      simulated.push_back(one.simulated_ms);
      ratios.push_back(one.measured_ms / one.simulated_ms);
      late.push_back(std::clamp(one.late_ms / one.measured_ms, 0.0, 1.0));
    }
    overhead.steps["others"].emplace_back(median(simulated), median(simulated) * median(ratios));
  }
  for (auto& [strategy, points] : overhead.steps) {
    std::sort(points.begin(), points.end());
    const auto same = [](const MeasuredPoint& a, const MeasuredPoint& b) { return a.first == b.first; };
    points.erase(std::unique(points.begin(), points.end(), same), points.end());
  }
  overhead.late = median(late);
  return overhead;
}

StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world,
                                   const ComputeMeasurement& measurement) {
  std::vector<std::vector<TrainingRounds>> models = trainings_of(world.size(), measurement);
  for (int round = 1; round <= kRounds; ++round)
    for (std::vector<TrainingRounds>& model : models)
      for (TrainingRounds& training : model) {
        measurement.say(fmt::format("training of gpt of width {} with {}, {} of {}", training.plan.model.width,
                                    training.strategy, round, kRounds));
        const RunResult run = run_training(training.plan, training.strategy, world, world.memory_tracker(), {}).result;
        training.step_ms.push_back(run.step_ms_median);
        training.exposed_ms.push_back(run.exposed_communication_ms);
      }
  const SimulatedCluster simulated = simulate(cluster, world.size());
  std::vector<std::vector<StepSample>> samples;
  for (const std::vector<TrainingRounds>& model : models) {
    samples.emplace_back();
    for (const TrainingRounds& training : model) samples.back().push_back(sample_of(training, simulated));
  }
  return fit_step_overhead(samples);
}

}  // namespace tessera::tools
