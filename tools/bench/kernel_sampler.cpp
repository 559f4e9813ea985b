#include "tools/bench/kernel_sampler.h"

#include <numeric>

#include "tessera/fsdp/engine.h"
#include "tools/bench/runner.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

void train_step(const plan::TrainingStep& step, fsdp::TrainingTask& task, fsdp::Engine& engine) {
  plan::run_microbatches(step, task, engine, 0);
  static_cast<void>(task.mean_loss());  // as a training reads it
  engine.step(1e-3);
  engine.wait();
}

}  // namespace

std::map<double, double> KernelSamples::means() const {
  std::map<double, double> all;
  for (const auto& [size, samples] : seconds)
    all[size] = std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
  return all;
}

std::map<double, double> KernelSamples::medians() const {
  std::map<double, double> all;
  for (const auto& [size, samples] : seconds) all[size] = median(samples);
  return all;
}

void KernelSampler::call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) {
  if (!on_) return run();
  const base::Event before = stream.record_timed();
  run();
  const base::Event after = stream.record_timed();
  const std::int64_t begun = before.time_ns();
  KernelSamples& samples = kernels_[{std::string(call.kernel), std::string(base::name_of(call.dtype))}];
  samples.product = call.product.count > 0;
  samples.seconds[call.size].push_back(static_cast<double>(after.time_ns() - begun) * 1e-9);
}

void KernelSampler::merge(const KernelSampler& other) {
  for (const auto& [name, samples] : other.kernels_) {
    KernelSamples& mine = kernels_[name];
    mine.product = samples.product;
    for (const auto& [size, seconds] : samples.seconds)
      mine.seconds[size].insert(mine.seconds[size].end(), seconds.begin(), seconds.end());
  }
}

std::size_t KernelSampler::calls() const {
  std::size_t calls = 0;
  for (const auto& [name, samples] : kernels_)
    for (const auto& [size, seconds] : samples.seconds) calls += seconds.size();
  return calls;
}

double KernelSampler::sum_of_times() const {
  double sum = 0;
  for (const auto& [name, samples] : kernels_)
    for (const auto& [size, seconds] : samples.seconds) sum = std::accumulate(seconds.begin(), seconds.end(), sum);
  return sum;
}

KernelTables means_of_rounds(std::span<const KernelSampler> rounds) {
  KernelTables all;
  for (const KernelSampler& round : rounds)
    for (const auto& [name, samples] : round.kernels()) {
      all[name].product = samples.product;
      for (const auto& [size, mean] : samples.means()) all[name].seconds[size].push_back(mean);
    }
  return all;
}

std::vector<MeasuredKernel> measured_kernels(const KernelTables& kernels, double factor) {
  std::vector<MeasuredKernel> all;
  for (const auto& [name, samples] : kernels) {
    MeasuredKernel table{name.first, name.second, {}};
    for (const auto& [size, seconds] : samples.medians()) table.points.emplace_back(size, factor * seconds);
    all.push_back(std::move(table));
  }
  return all;
}

std::vector<double> time_steps(const plan::TrainingStep& step, comm::Communicator& world,
                               comm::HostCollectives& control, int steps, KernelSampler* sampler) {
  std::shared_ptr<base::DeviceRuntime> runtime = base::open_device({});
  if (sampler != nullptr) runtime = nn::observe(std::move(runtime), *sampler);
  nn::Context context({.threads = step.threads,
                       .memory_tracker = world.memory_tracker(),
                       .memory = {},
                       .make_stream = {},
                       .device = {},
                       .runtime = std::move(runtime),
                       .products = step.products});
  const std::unique_ptr<fsdp::TrainingTask> task = step.make_task(context);
  fsdp::Engine engine(task->model(), world, step.engine);
  engine.initialize(0);
  constexpr int kFewSteps = 3;  // as many as of long steps
  for (int i = 0; i < (steps > kFewSteps ? 2 : 1); ++i) train_step(step, *task, engine);
  if (sampler != nullptr) sampler->turn(true);
  const std::vector<double> us =
      measure(control, {.warmup = 0, .iterations = steps}, [&] { train_step(step, *task, engine); });
  if (sampler != nullptr) sampler->turn(false);
  std::vector<double> seconds;
  for (const double one : us) seconds.push_back(one * 1e-6);
  return seconds;
}

}  // namespace tessera::tools
