#include "tools/bench/machine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/strategy.h"
#include "tools/bench/runner.h"
#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

using Family = nn::ModelConfig::Family;

struct Shape {
  Family family = Family::gpt2;
  std::int64_t layers = 1;
  std::int64_t width = 64;
  std::int64_t heads = 2;
  std::int64_t sequences = 1;
  std::int64_t seq_len = 64;
  double dropout = 0;
};

nn::ModelConfig calibration_model(const Shape& shape) {
  nn::ModelConfig model = nn::preset(shape.family == Family::gpt2 ? "gpt-nano" : "llama-nano");
  model.layers = shape.layers;
  model.width = shape.width;
  model.heads = model.kv_heads = shape.heads;
  model.head_dim = shape.width / shape.heads;
  model.hidden = shape.family == Family::gpt2 ? 4 * shape.width : (8 * shape.width / 3 + 7) / 8 * 8;
  model.context = std::max(model.context, shape.seq_len);
  model.embedding_dropout = model.residual_dropout = model.attention_dropout = shape.dropout;
  return model;
}

CalibrationStep calibration(const Shape& shape, base::DType dtype, int threads, bool timed) {
  CalibrationStep one{
      .model = calibration_model(shape), .dtype = dtype, .seq_len = shape.seq_len, .step = {}, .timed = timed};
  one.step = {.make_task =
                  [model = one.model, dtype, timed, positions = shape.seq_len](nn::Context& context) {
                    auto made = nn::make_model(context, model);
                    made->set_dtype(dtype);
                    // Training runs activation functions as a part of a product; to recompute them they run alone.
                    if (!timed) context.set_recomputed({.activations = true});
                    return plan::make_token_task(std::move(made), positions);
                  },
              .samples = shape.sequences,
              .threads = threads,
              .engine = {.strategy = fsdp::strategy_named("fsdp")}};
  return one;
}

void train_step(const plan::TrainingStep& step, fsdp::TrainingTask& task, fsdp::Engine& engine) {
  plan::run_microbatches(step, task, engine, 0);
  static_cast<void>(task.mean_loss());  // as a training reads it
  engine.step(1e-3);
  engine.wait();
}

constexpr double kSmallestForPeak = 64 * 1024;  // bytes; below, a kernel's start counts

/// All models are measured this often, so that a disturbance of some seconds doesn't decide a kernel's time.
constexpr int kRounds = 3;

/// Steps of a round that make about a third of a second's work, within bounds.
int steps_for(const CalibrationStep& one) {
  const auto work = static_cast<double>(one.model.layers * one.model.width * one.model.width) *
                    static_cast<double>(one.step.samples * one.seq_len);
  return std::clamp(static_cast<int>(2e9 / work / kRounds), 3, 14);
}

/// Times one model: its kernels on all ranks together, and its steps on each rank alone.
OverheadSample sample(const CalibrationStep& one, int steps, comm::HostCollectives& control, comm::Communicator& alone,
                      KernelSampler& kernels) {
  time_steps(one.step, control.communicator(), control, std::max(1, steps / 2), &kernels);
  const std::size_t calls = kernels.calls();
  const double seconds = kernels.sum_of_times();
  time_steps(one.step, alone, control, steps, &kernels);
  if (!one.timed) return {};
  return {median(time_steps(one.step, alone, control, steps, nullptr)), (kernels.sum_of_times() - seconds) / steps,
          static_cast<double>(kernels.calls() - calls) / steps};
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
  const double seconds = static_cast<double>(after.time_ns() - begun) * 1e-9;
  samples.seconds[call.size].push_back(seconds);
  ++calls_;
  sum_of_times_ += seconds;
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

std::vector<CalibrationStep> calibration_steps(int threads) {
  using base::DType;
  std::vector<CalibrationStep> all;
  for (const Shape& shape : {Shape{Family::gpt2, 2, 48, 2, 3, 64}, Shape{Family::gpt2, 2, 80, 2, 6, 64},
                             Shape{Family::gpt2, 4, 160, 4, 4, 128}, Shape{Family::gpt2, 4, 256, 4, 4, 256},
                             Shape{Family::gpt2, 1, 448, 7, 6, 256}, Shape{Family::llama, 2, 64, 4, 6, 64}})
    all.push_back(calibration(shape, DType::f32, threads, true));
  all.push_back(calibration({Family::llama, 1, 256, 8, 4, 128}, DType::f32, threads, false));
  for (const Shape& shape : {Shape{Family::gpt2, 1, 64, 2, 4, 64, 0.1}, Shape{Family::gpt2, 1, 256, 4, 4, 128, 0.1}})
    all.push_back(calibration(shape, DType::f32, threads, false));
  for (const Shape& shape : {Shape{Family::gpt2, 2, 64, 2, 3, 64}, Shape{Family::gpt2, 1, 256, 4, 4, 128},
                             Shape{Family::llama, 1, 128, 4, 3, 64}})
    all.push_back(calibration(shape, DType::bf16, threads, false));
  CalibrationStep clipped = calibration({Family::gpt2, 2, 64, 2, 3, 64}, DType::f32, threads, false);
  clipped.step.engine.clip_norm = 1;
  clipped.step.engine.strategy = fsdp::strategy_named("ddp");
  clipped.step.engine.optimizer.kind = nn::parse_optimizer("sgd");
  clipped.step.engine.optimizer.momentum = 0.9;
  clipped.step.microbatches = 2;
  all.push_back(std::move(clipped));
  return all;
}

HostOverhead fit_overhead(const std::vector<OverheadSample>& samples) {
  struct Point {  // y = latency + factor * x; errors are relative to the step
    double x = 0, y = 0, weight = 1;
  };
  std::vector<Point> points;
  for (const OverheadSample& one : samples)
    if (one.calls > 0)
      points.push_back({one.kernels / one.calls * 1e6, one.step / one.calls * 1e6, one.calls / one.step});
  if (points.size() < kFewestFitPoints) return {};
  // Some are wrong, because other programs used the machine, so the line is that with the least sum of weighted
  // absolute errors. It passes two points, or one if a coefficient is 0, or none if both are.
  std::vector<HostOverhead> lines = {{0, 0}};
  for (const Point& a : points) {
    lines.push_back({0, a.y});
    if (a.x > 0) lines.push_back({a.y / a.x, 0});
    for (const Point& b : points) {
      if (!(b.x > a.x)) continue;
      const double slope = (b.y - a.y) / (b.x - a.x);
      lines.push_back({slope, a.y - slope * a.x});
    }
  }
  HostOverhead best;
  double least = std::numeric_limits<double>::infinity();
  for (const HostOverhead& line : lines) {
    if (line.latency_us < 0 || line.factor < 0) continue;
    double error = 0;
    for (const Point& point : points)
      error += point.weight * std::abs(line.latency_us + line.factor * point.x - point.y);
    if (error >= least) continue;
    least = error;
    best = line;
  }
  return best.factor > 0 ? best : HostOverhead();
}

void set_peaks(ComputeSpec& compute, const KernelTables& kernels, double factor) {
  std::vector<double> rates;
  for (const auto& [name, samples] : kernels) {
    const auto largest = *samples.medians().rbegin();
    if (!(largest.second > 0)) continue;
    const double rate = largest.first / (factor * largest.second);
    if (samples.product) {
      double& peak = compute.peak_flops[name.second];
      peak = std::max(peak, rate);
    } else if (largest.first >= kSmallestForPeak) {
      rates.push_back(rate);
    }
  }
  compute.memory_bytes_per_second = median(rates);
}

ComputeSpec measure_compute(comm::Communicator& world, const ComputeMeasurement& measurement) {
  const std::shared_ptr<base::DeviceRuntime> device = base::open_device({});
  comm::HostCollectives control(world, *device);
  const std::unique_ptr<comm::Communicator> alone = world.split(world.rank(), 0);
  std::array<KernelSampler, kRounds> rounds;
  std::vector<OverheadSample> samples;
  const std::vector<CalibrationStep> models = calibration_steps(measurement.threads);
  for (std::size_t round = 0; round < rounds.size(); ++round)
    for (const CalibrationStep& one : models) {
      measurement.say(fmt::format("kernels of {} of width {}, {} sequences of {}, {} (round {} of {})",
                                  one.model.family == Family::gpt2 ? "gpt" : "llama", one.model.width, one.step.samples,
                                  one.seq_len, base::name_of(one.dtype), round + 1, kRounds));
      samples.push_back(sample(one, std::min(steps_for(one), measurement.most_steps), control, *alone, rounds[round]));
    }
  const HostOverhead overhead = fit_overhead(samples);
  ComputeSpec compute;
  compute.kernel_latency_us = overhead.latency_us;
  const KernelTables kernels = means_of_rounds(rounds);
  compute.kernels = measured_kernels(kernels, overhead.factor);
  set_peaks(compute, kernels, overhead.factor);
  return compute;
}

}  // namespace tessera::tools
