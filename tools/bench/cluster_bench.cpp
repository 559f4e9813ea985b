// tessera bench --cluster: measures this machine and writes it as a cluster file.
#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/sysinfo.h>

#include <algorithm>
#include <chrono>

#include "tessera/base/cores.h"
#include "tessera/base/error.h"
#include "tessera/comm/launch.h"
#include "tools/bench/machine.h"
#include "tools/bench/options.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/launch/ranks.h"
#include "tools/plan/step_plan.h"
#include "tools/results/comparison.h"
#include "tools/results/statistics.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

constexpr int kMostSteps = 40;

/// Called by the process that sees all cores: a bound rank sees only its share.
std::string description_of(const std::string& backend, int ranks) {
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return fmt::format("{}; {} ranks over {}, {:%Y-%m-%d}", machine_line(), ranks, backend, fmt::gmtime(now));
}

double memory_of_rank(int ranks) {
  struct sysinfo memory {};
  if (::sysinfo(&memory) != 0) return 1;
  return static_cast<double>(memory.totalram) * memory.mem_unit / ranks;
}

void add_sources(ClusterSpec& cluster, const std::string& algorithms) {
  const std::string source = "measured by tessera bench --cluster";
  cluster.sources = {{"links.intra", "the line through the times of all_gather among all ranks", source},
                     {"measured",
                      "medians of the slowest rank, all groups of ranks at once" +
                          (algorithms.empty() ? std::string() : ", TESSERA_ALGO=" + algorithms),
                      source},
                     {"compute.memory_bytes", "the host's memory divided by the ranks", source},
                     {"compute.memory_bytes_per_second", "the median rate of the kernels that are no products", source},
                     {"compute.kernel_latency_us", "what a step takes besides its kernels, for each of them", source},
                     {"compute.overhead", "steps of four models, as trained and as simulated", source},
                     {"compute.peak_flops", "the fastest product", source},
                     {"compute.efficiencies", "1: the peaks are measured", source},
                     {"compute.kernels", "medians while all ranks compute at once", source}};
}

constexpr std::size_t kModels = 4;  ///< the first ones of calibration_steps(), from small to large
constexpr double kWork = 1.2e10;    ///< of a training, in parameters times tokens
constexpr int kFewestSteps = 8;     // unless --iterations asks for less
constexpr int kTrainingRounds = 3;  ///< of all trainings, since a disturbance lasts for longer than some of them

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
  std::size_t model = 0;
  std::string strategy;
  TrainPlan plan;
  std::vector<double> step_ms, exposed_ms;
};

std::vector<TrainingRounds> trainings_of(int ranks, const ComputeMeasurement& measurement) {
  const std::vector<CalibrationStep> models = calibration_steps(measurement.threads);
  std::vector<TrainingRounds> all;
  for (std::size_t model = 0; model < kModels; ++model)
    for (const std::string& strategy : strategies_for(ranks))
      all.push_back({model, strategy, training_of(models[model], ranks, measurement), {}, {}});
  return all;
}

StepSample sample_of(const TrainingRounds& training, const SimulatedCluster& cluster) {
  const RunResult planned = plan_step(training.plan, training.strategy, cluster).result;
  return {training.strategy, median(training.step_ms), planned.step_ms_median,
          median(training.exposed_ms) - planned.exposed_communication_ms};
}

/// Collective: trains four models with several strategies on `world`, whose links and kernels `cluster` has. The
/// result of rank 0 counts.
StepOverhead measure_step_overhead(const ClusterSpec& cluster, comm::Communicator& world,
                                   const ComputeMeasurement& measurement) {
  std::vector<TrainingRounds> trainings = trainings_of(world.size(), measurement);
  for (int round = 1; round <= kTrainingRounds; ++round)
    for (TrainingRounds& training : trainings) {
      measurement.say(fmt::format("training of gpt of width {} with {}, {} of {}", training.plan.model.width,
                                  training.strategy, round, kTrainingRounds));
      const RunResult run = run_training(training.plan, training.strategy, world, world.memory_tracker(), {}).result;
      training.step_ms.push_back(run.step_ms_median);
      training.exposed_ms.push_back(run.exposed_communication_ms);
    }
  const SimulatedCluster simulated = simulate(cluster, world.size());
  std::vector<std::vector<StepSample>> samples(kModels);
  for (const TrainingRounds& training : trainings) samples[training.model].push_back(sample_of(training, simulated));
  return fit_step_overhead(samples);
}

/// Collective: measures links and kernels of this machine with the ranks of `world`, each with `threads`. The result of
/// rank 0 counts. `say` is called with a line before each part.
ClusterSpec measure_cluster(const BenchSpec& spec, comm::Communicator& world, int threads,
                            const std::function<void(const std::string&)>& say) {
  ClusterSpec cluster;
  cluster.name = fmt::format("{}-{}", world.backend(), world.size());
  cluster.description = description_of(std::string(world.backend()), world.size());
  cluster.hosts = 1;
  cluster.ranks_per_host = world.size();
  cluster.sharing = PortSharing::in_order;  // as calls in flight were measured
  cluster.measured = measure_collectives(spec, world, say);
  cluster.intra = fit_link(cluster.measured, world.size());
  const ComputeMeasurement measurement{
      .threads = threads, .most_steps = spec.iterations.value_or(kMostSteps), .say = say};
  cluster.compute = measure_compute(world, measurement);
  cluster.compute.memory_bytes = memory_of_rank(world.size());
  cluster.compute.overhead = measure_step_overhead(cluster, world, measurement);
  add_sources(cluster, comm_variable("TESSERA_ALGO").value_or(""));
  return cluster;
}

int threads_per_rank(const BenchOptions& options, int ranks) {
  return options.threads.value_or(std::max(1, base::usable_cores() / ranks));
}

ClusterSpec measure_as_rank(const BenchOptions& options, const BenchSpec& spec, const std::string& backend,
                            const std::function<void(const std::string&)>& say) {
  auto world = init_world({.ranks = spec.ranks,
                           .backend = backend,
                           .algorithms = "",
                           .memory_tracker = std::make_shared<base::MemoryTracker>()});
  const bool first = world->rank() == 0;
  ClusterSpec cluster =
      measure_cluster(spec, *world, threads_per_rank(options, spec.ranks), [&](const std::string& line) {
        if (first) say(line);
      });
  world.reset();  // two worlds can't listen on one TESSERA_MASTER
  // The memory is that of a run of compare, with which plans can be compared to the byte.
  const auto compared = init_world({.ranks = spec.ranks,
                                    .backend = backend,
                                    .algorithms = kComparedAlgorithms,
                                    .generation = 1,
                                    .memory_tracker = std::make_shared<base::MemoryTracker>()});
  cluster.communicators = measure_communicators(*compared);
  return cluster;
}

void say_part(const std::string& line) { print_now("# measuring " + line + "\n"); }

int write_cluster_file(const BenchOptions& options, const ordered_json& cluster) {
  write_json(options.cluster, cluster);
  print_now(fmt::format("# {}\n# {} is written; tessera plan --cluster {} uses it\n",
                        cluster.at("description").get<std::string>(), options.cluster, options.cluster));
  return 0;
}

int measure_in_ranks(const CommandLine& commands, const BenchOptions& options, const BenchSpec& spec) {
  const std::string& backend = spec.backends.front();
  ordered_json cluster;
  const int code =
      run_ranks(commands, spec, backend, {"--threads", std::to_string(threads_per_rank(options, spec.ranks))},
                [&](const ordered_json& line) {
                  if (line.contains("part")) say_part(line["part"].get<std::string>());
                  if (line.contains("cluster")) cluster = line["cluster"];
                });
  if (code == 0) cluster["description"] = description_of(backend, spec.ranks);
  return code != 0 ? code : write_cluster_file(options, cluster);
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

int bench_cluster(const CommandLine& commands, const BenchOptions& options, BenchSpec spec) {
  if (spec.backends.size() != 1)
    throw base::InvalidUsage(fmt::format("--cluster: a file is for one backend, not for {}; give one --backend",
                                         fmt::join(spec.backends, ",")));
  if (spec.ranks == 1) throw base::InvalidUsage("--cluster needs two ranks or more, not --ranks 1");
  spec.ops.clear();
  for (const char* name : {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"})
    spec.ops.push_back(&bench_op(name));
  if (spec.sizes(*spec.ops.front()).size() < kFewestFitPoints)
    throw base::InvalidUsage("--cluster: a link needs three sizes or more; raise --max-bytes or lower --factor");
  if (!options.only.empty()) {
    const ClusterSpec cluster = measure_as_rank(options, spec, options.only, [](const std::string& part) {
      print_json({{"part", part}});
    });
    if (comm::resolve_launch().rank == 0) print_json({{"cluster", to_json(cluster)}});
    return 0;
  }
  const bool first = comm::resolve_launch().rank == 0;
  if (first) check_writable("--cluster", options.cluster);
  if (must_spawn(spec.ranks)) {
    warn_if_alone_under_launcher(spec.ranks);
    return measure_in_ranks(commands, options, spec);
  }
  const ClusterSpec cluster = measure_as_rank(options, spec, spec.backends.front(), say_part);
  return first ? write_cluster_file(options, to_json(cluster)) : 0;
}

}  // namespace tessera::tools
