// One step on real ranks: run_real_step() of explanation.h.
#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "tessera/base/checksum.h"
#include "tessera/fsdp/wrap.h"
#include "tools/cli/output.h"
#include "tools/explain/explanation.h"
#include "tools/plan/step_plan.h"
#include "tools/train/step_recorder.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

constexpr int kWarmUp = 2;  // steps that warm up caches and pools

/// With a sync period, the simulated step is the one after a whole period.
int timed_steps(const fsdp::Strategy& strategy) {
  return fsdp::periodic_axis(strategy).empty() ? kWarmUp + 1 : sync_period(strategy) + 1;
}

template <class T>
double squares_of(const void* data, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = static_cast<double>(static_cast<float>(static_cast<const T*>(data)[i]));
    sum += value * value;
  }
  return sum;
}

double sum_of_squares(fsdp::Runtime& runtime, const void* data, base::DType dtype, std::size_t count) {
  double sum = 0;
  runtime.download(data, count * base::size_of(dtype), [&](const void* values) {
    sum = dtype == base::DType::bf16  ? squares_of<base::bf16>(values, count)
          : dtype == base::DType::f16 ? squares_of<base::f16>(values, count)
                                      : squares_of<float>(values, count);
  });
  return sum;
}

/// Looks at a rank's values where the engine's hooks are called: after a unit is unsharded, and before its gradients
/// are reduced.
class ValueProbe {
 public:
  void attach(fsdp::Engine& engine) {
    fsdp::Module& model = engine.model().root();
    runtime_ = &engine.model().runtime();
    specs_ = fsdp::make_units(model, engine.options().wrap);
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      values_.units.push_back({.name = specs_[i].name});
      for (fsdp::Module* part : specs_[i].modules) {
        fsdp::ModuleHooks hooks = part->hooks();
        hooks.pre_forward = [this, i, engine_hook = hooks.pre_forward](fsdp::Phase phase) {
          if (engine_hook) engine_hook(phase);
          if (values_.units[i].weights_hash.empty()) hash_weights(i);
        };
        hooks.post_backward = [this, i, &engine, engine_hook = hooks.post_backward] {
          measure_gradient(i, engine.loss_scale());
          if (engine_hook) engine_hook();
        };
        part->set_hooks(std::move(hooks));
      }
    }
  }

  void before_update(fsdp::Engine& engine, double loss) {
    values_.loss = loss;
    std::map<const fsdp::Parameter*, std::size_t> unit_of;
    for (std::size_t i = 0; i < specs_.size(); ++i)
      for (const auto& parameter : specs_[i].parameters) unit_of[parameter.get()] = i;
    engine.for_each_gradient([&](const fsdp::GradientShard& shard) {
      UnitGradient& mine = values_.units[unit_of.at(&shard.parameter)].shard;
      if (mine.elements == 0) mine.first = fmt::format("{}[{}]", shard.parameter.name(), shard.range.begin);
      mine.elements += shard.range.count();
      const auto count = static_cast<std::size_t>(shard.range.count());
      mine.sum_of_squares +=
          sum_of_squares(*runtime_, shard.data, shard.dtype, count) / (engine.loss_scale() * engine.loss_scale());
    });
  }

  const RankValues& values() const { return values_; }

 private:
  void hash_weights(std::size_t unit) {
    base::RunningChecksum hash;
    for (const auto& parameter : specs_[unit].parameters) {
      if (parameter->count() == 0) continue;
      runtime_->download(parameter->data(), parameter->bytes(), [&](const void* data) {
        hash.add({static_cast<const std::byte*>(data), parameter->bytes()});
      });
    }
    values_.units[unit].weights_hash = fmt::format("{:016x}", hash.value()).substr(0, 8);
  }

  void measure_gradient(std::size_t unit, double scale) {
    double sum = 0;
    for (const auto& parameter : specs_[unit].parameters) {
      if (!parameter->requires_grad() || parameter->gradient() == nullptr) continue;
      sum += sum_of_squares(*runtime_, parameter->gradient(), parameter->dtype(),
                            static_cast<std::size_t>(parameter->count()));
    }
    values_.units[unit].gradient_norm = std::sqrt(sum) / scale;
  }

  fsdp::Runtime* runtime_ = nullptr;
  std::vector<fsdp::UnitSpec> specs_;
  RankValues values_;
};

nlohmann::ordered_json to_message(const RankValues& values) {
  nlohmann::ordered_json units = nlohmann::ordered_json::array();
  for (const UnitValues& unit : values.units)
    units.push_back({unit.name, unit.weights_hash, unit.gradient_norm, unit.shard.first, unit.shard.elements,
                     unit.shard.sum_of_squares});
  return {{"loss", values.loss}, {"units", units}};
}

RankValues from_message(const base::JsonReader& message) {
  RankValues values{.loss = message.at("loss").number_or_nan()};
  for (const base::JsonReader& unit : message.at("units").elements())
    values.units.push_back(
        {unit.at(0), unit.at(1), unit.at(2).number_or_nan(), {unit.at(3), unit.at(4), unit.at(5).number_or_nan()}});
  return values;
}

RankValues first_step_values(const TrainPlan& plan, comm::Communicator& world,
                             const std::shared_ptr<base::MemoryTracker>& memory_tracker) {
  ValueProbe probe;
  const TrainingCallbacks callbacks{
      .on_ready = [&](fsdp::Engine& engine) { probe.attach(engine); },
      .before_update = [&](fsdp::Engine& engine, double loss) { probe.before_update(engine, loss); }};
  run_training(plan, plan.options.strategy, world, memory_tracker, callbacks);
  return probe.values();
}

}  // namespace

std::optional<double> whole_norm(const RealStep& step, std::size_t unit) {
  std::map<std::pair<std::string, std::int64_t>, double> seen;
  double sum = 0;
  for (const RankValues& rank : step.ranks) {
    const UnitGradient& shard = rank.units.at(unit).shard;
    const auto [same, added] = seen.emplace(std::pair(shard.first, shard.elements), shard.sum_of_squares);
    if (added)
      sum += shard.sum_of_squares;
    else if (same->second != shard.sum_of_squares)
      return std::nullopt;
  }
  return std::sqrt(sum);
}

RealStep run_real_step(const TrainPlan& plan, comm::Communicator& world,
                       const std::shared_ptr<base::MemoryTracker>& memory_tracker) {
  const RankValues own = first_step_values(plan, world, memory_tracker);
  const fsdp::EngineOptions engine = engine_options(plan, plan.options.strategy);
  plan::TrainingStep training = training_step(plan, engine);
  training.memory_history = true;
  const int steps = timed_steps(engine.strategy);
  const plan::StepProfile profile = plan::profile_step(training, world, steps);
  const plan::StepTimes& timed = profile.steps.back();

  const auto communicator = world.split(0, world.rank());
  const auto runtime = base::open_device({});
  comm::HostCollectives control(*communicator, *runtime);
  RealStep step;
  for (const nlohmann::json& message : gather_json(control, to_message(own)))
    step.ranks.push_back(from_message({message, "the values of a rank"}));
  step.timeline =
      gather_step(control, {steps, timed.begin_ns, timed.begin_ns + timed.step_ns, timed.events, timed.memory});
  const std::vector<std::uint64_t> times = {static_cast<std::uint64_t>(timed.begin_ns),
                                            static_cast<std::uint64_t>(timed.step_ns)};
  const auto all_times = control.gather_all(times);
  step.begin_ns = static_cast<std::int64_t>(all_times.back()[0]);
  step.step_ns = static_cast<std::int64_t>(all_times.back()[1]);
  for (base::TraceEvent& event : gather_events(control, timed.events))
    if (event.rank == world.size() - 1) step.events.push_back(std::move(event));
  return step;
}

}  // namespace tessera::tools
