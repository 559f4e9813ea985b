#include "tools/bench/step_overhead.h"

#include <fmt/format.h>

#include <filesystem>
#include <numeric>

#include "tools/bench/machine_kernels.h"
#include "tools/bench/robust_line.h"
#include "tools/plan/step_plan.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

constexpr int kSteps = 40;
constexpr int kSmallModels =
    3;  ///< the first ones of calibration_steps(): in larger ones the overhead is lost in noise

/// The training of a calibration model. Its text is this program: any file will do.
TrainPlan training_of(const SampledStep& step, int ranks, int threads) {
  TrainOptions options;
  options.model = "gpt-nano";
  options.steps = 0;
  options.global_batch = step.sequences * ranks;
  TrainPlan plan = make_plan(options, ranks);
  plan.model = step.model;
  plan.seq_len = step.seq_len;
  plan.threads = threads;
  plan.ranks_per_host = ranks;
  plan.options.steps = kSteps;
  plan.schedule.steps = kSteps;
  const std::string text = std::filesystem::read_symlink("/proc/self/exe").string();
  plan.data = std::make_shared<const nn::TokenDataset>(std::vector{text}, nn::parse_token_format("bytes"),
                                                       plan.model.vocabulary);
  return plan;
}

std::vector<std::string> strategies_for(int ranks) {
  std::vector<std::string> all = {"ddp", "zero1", "fsdp"};
  if (ranks >= 4 && ranks % 2 == 0) all.emplace_back("hsdp");
  return all;
}

StepSample sample_of(const TrainPlan& plan, const std::string& strategy, const SimulatedCluster& cluster,
                     comm::Communicator& world) {
  const StepPlan planned = plan_step(plan, strategy, cluster);
  const PerCollective& calls = planned.result.calls_per_step;
  const TrainingOutcome outcome = run_training(plan, strategy, world, world.memory_tracker(), {});
  return {outcome.result.step_ms_median, planned.result.step_ms_median,
          static_cast<double>(calls.all_gather + calls.reduce_scatter + calls.all_reduce + calls.control)};
}

}  // namespace

StepOverhead fit_step_overhead(const std::vector<StepSample>& samples) {
  std::vector<WeightedPoint> points;
  for (const StepSample& one : samples)
    points.push_back({one.calls, 1e3 * (one.measured_ms - one.planned_ms), 1 / one.measured_ms});
  const auto line = robust_line(points);
  return line ? StepOverhead{line->intercept, line->slope} : StepOverhead{};
}

StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world, int threads,
                                   const std::function<void(const std::string&)>& say) {
  const SimulatedCluster simulated = simulate(cluster, world.size());
  std::vector<StepSample> samples;
  std::vector<CalibrationStep> models = calibration_steps(threads);
  models.resize(kSmallModels);
  for (const CalibrationStep& one : models)
    for (const std::string& strategy : strategies_for(world.size())) {
      say(fmt::format("training of gpt of width {} with {}", one.step.model.width, strategy));
      const TrainPlan plan = training_of(one.step, world.size(), threads);
      samples.push_back(sample_of(plan, strategy, simulated, world));
    }
  return fit_step_overhead(samples);
}

}  // namespace tessera::tools
