#include "tessera/nn/optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"
#include "tessera/nn/lr_schedule.h"

namespace tessera::nn {
namespace {

using Kind = OptimizerConfig::Kind;

std::vector<kernels::DecayPart> parts_of(const OptimizerConfig& config, const OptimizerRange& range) {
  std::vector<kernels::DecayPart> parts;
  for (const DecayRange& part : range.parts)
    parts.push_back({static_cast<std::size_t>(part.end), part.decay ? config.decay() : 0.0});
  return parts;
}

/// Arguments of Step's kernel, but for the optimizer's own.
template <class Step>
Step step_of(const OptimizerConfig& config, const OptimizerStep& step, const OptimizerRange& range,
             std::span<const kernels::DecayPart> parts) {
  Step args;
  args.parameter = range.values;
  args.gradient = range.gradients;
  args.count = static_cast<std::size_t>(range.count);
  args.learning_rate = step.learning_rate;
  args.parts = parts;
  args.weight_decay = range.decay ? config.decay() : 0.0;
  args.maximize = config.maximize;
  args.grad_scale_at = step.gradient_scale;
  args.half = range.half;
  return args;
}

}  // namespace

void update(Context& context, const OptimizerConfig& config, const OptimizerStep& step, const OptimizerRange& range) {
  if (range.count == 0) return;
  const std::vector<kernels::DecayPart> parts = parts_of(config, range);
  KernelTable<float>& table = context.kernels<float>("optimizer");
  if (config.kind == Kind::sgd) {
    auto args = step_of<kernels::SgdStep<float>>(config, step, range, parts);
    args.momentum_buffer = range.state[0];
    args.momentum = config.momentum;
    args.nesterov = config.nesterov;
    args.first_step = step.number == 1;
    return table.sgd_step(context.stream(), args);
  }
  auto args = step_of<kernels::AdamStep<float>>(config, step, range, parts);
  args.first_moment = range.state[0];
  args.second_moment = range.state[1];
  args.max_second_moment = config.amsgrad ? range.state[2] : nullptr;
  args.step = step.number;
  args.beta1 = config.beta1;
  args.beta2 = config.beta2;
  args.eps = config.eps;
  args.decoupled = config.kind == Kind::adamw;
  table.adam_step(context.stream(), args);
}

Optimizer::Optimizer(Module& model, OptimizerConfig config) : config_(config) {
  validate(config_);
  Context& context = model.context();
  for (const auto& parameter : model.parameters()) {
    Entry entry{parameter, {}, {}};
    const Tensor& tensor = parameter->tensor();
    const std::size_t bytes = static_cast<std::size_t>(tensor.count()) * sizeof(float);
    for (int slot = 0; slot < state_slots(config_); ++slot) {
      entry.state.push_back(context.memory().allocate(bytes, MemoryCategory::optimizer));
      context.runtime().fill(context.stream(), entry.state.back().data(), 0, bytes);
    }
    if (tensor.dtype() != DType::f32) {
      entry.master = context.memory().allocate(bytes, MemoryCategory::optimizer);
      context.device_kernels().convert(context.stream(), {tensor.raw(), tensor.dtype(), entry.master.data(), DType::f32,
                                                          static_cast<std::size_t>(tensor.count())});
    }
    entries_.push_back(std::move(entry));
  }
}

void Optimizer::step(double learning_rate) {
  OptimizerStep step;
  step.number = ++steps_;
  step.learning_rate = learning_rate;
  for (Entry& entry : entries_) {
    const Tensor& tensor = entry.parameter->tensor();
    Gradient& gradient = entry.parameter->gradient();
    if (!gradient.written()) continue;  // as in PyTorch: an unused parameter stays unchanged
    OptimizerRange range;
    if (entry.master) {
      range.values = static_cast<float*>(entry.master.data());
      range.half = {tensor.dtype(), gradient.value().raw(), tensor.raw()};
    } else {
      range.values = tensor.data<float>();
      range.gradients = gradient.value().data<float>();
    }
    for (std::size_t slot = 0; slot < entry.state.size(); ++slot)
      range.state[slot] = static_cast<float*>(entry.state[slot].data());
    range.count = tensor.count();
    range.decay = entry.parameter->decays();
    update(tensor.context(), config_, step, range);
    gradient.clear();
  }
}

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
