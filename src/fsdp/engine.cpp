#include "tessera/fsdp/engine.h"

#include <cmath>
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp/engine/engine_core.h"
#include "tessera/fsdp/engine/unit_scheduler.h"

namespace tessera::fsdp {

using Gradients = UnitScheduler::Gradients;

Engine::Engine(std::unique_ptr<Model> adapted, comm::Communicator& world, EngineOptions options)
    : adapted_(std::move(adapted)),
      core_(std::make_unique<EngineCore>(*adapted_, world, std::move(options))),
      state_(*core_),
      stats_(*core_) {
  begin();
}

Engine::Engine(Model& model, comm::Communicator& world, EngineOptions options)
    : core_(std::make_unique<EngineCore>(model, world, std::move(options))), state_(*core_), stats_(*core_) {
  begin();
}

void Engine::begin() {
  core_->publish_values();
  scheduler_ = std::make_unique<UnitScheduler>(*core_);
}

Engine::~Engine() {
  EngineResources& resources = core_->resources;
  if (resources.offload) resources.offload->finish();  // copies may still use memory that the units release
  try {
    if (std::uncaught_exceptions() > 0)
      core_->drain_after_exception();
    else if (!resources.runtime.device_runtime().host_accessible())
      resources.wait_for_device();  // the communicator reuses or frees its memory immediately
  } catch (const Error&) {          // from an operation whose failure its caller already knows
  }
}

void Engine::set_is_last_backward(bool last) { scheduler_->set_is_last_backward(last); }

void Engine::step(double learning_rate) {
  scheduler_->begin_update();
  OptimizerStep step{.number = ++core_->steps - core_->skipped_steps, .learning_rate = learning_rate};
  const EngineOptions& options = core_->options;
  if (core_->norm) {
    core_->norm->compute(loss_scale_);
    if (options.clip_norm > 0 || options.use_loss_scaling) step.gradient_scale = core_->norm->clip_factor();
  }
  core_->replicas_apart = core_->units.front()->plan().periodic.has_value();
  const bool syncs = core_->replicas_apart && core_->steps % core_->sync_period() == 0;
  for (const auto& unit : core_->units) {
    unit->optimizer.update(options, step);
    if (!syncs) unit->group.all_gather_updated();
  }
  if (syncs) sync_replicas();
  core_->model.on_update();
}

void Engine::sync_replicas() {
  if (!std::exchange(core_->replicas_apart, false)) return;
  for (const auto& unit : core_->units) unit->sync.start_sync();
  for (const auto& unit : core_->units) {
    unit->sync.finish_sync();
    unit->group.all_gather_updated();
  }
}

void Engine::wait() { core_->join_step(); }
void Engine::abort_step() { scheduler_->abort_step(); }

void Engine::set_loss_scale(double scale) {
  if (!core_->options.use_loss_scaling)
    throw InvalidUsage("set_loss_scale: loss scaling is off; set EngineOptions::use_loss_scaling");
  if (!(scale > 0) || !std::isfinite(scale))
    throw InvalidUsage("set_loss_scale: " + std::to_string(scale) + "; pass a finite number above 0");
  loss_scale_ = scale;
}

double Engine::grad_norm() {
  if (!core_->norm)
    throw InvalidUsage("grad_norm: the norm is not measured; set clip_norm, measure_norm or use_loss_scaling");
  return core_->norm->value();
}

void Engine::for_each_gradient(const std::function<void(const GradientShard&)>& visitor) {
  if (scheduler_->gradients() != Gradients::complete)
    throw InvalidUsage("for_each_gradient: gradients are incomplete; call it after the last backward");
  if (core_->resources.offload && core_->norm)
    throw Unsupported(
        "for_each_gradient: with cpu offload the norm is computed before gradients move to the host; disable one");
  scheduler_->finish_reductions();
  if (core_->resources.offload) core_->begin_writing_values();
  for (const auto& unit : core_->units) unit->reducer.for_each_gradient(visitor);
  if (core_->norm) core_->norm->on_gradients_written();
}

void Engine::apply_requires_grad() {
  if (scheduler_->gradients() != Gradients::none)
    throw InvalidUsage("apply_requires_grad: a backward has no step yet; call step() or abort_step() first");
  std::string frozen;
  for (const auto& parameter : state_.parameters()) {
    const bool trains = parameter->requires_grad();
    if (trains && parameter->dtype() == DType::u8)
      throw InvalidUsage("apply_requires_grad: " + parameter->name() +
                         " is quantized and cannot be trained; clear its requires_grad");
    if (!trains) frozen += " " + parameter->name();
  }
  core_->agree("apply_requires_grad with " + (frozen.empty() ? "nothing frozen" : "frozen" + frozen));
  scheduler_->on_layout_changed();
  if (core_->units.front()->plan().periodic)
    throw Unsupported("apply_requires_grad: strategy " + core_->options.strategy.name +
                      " has a sync period, and its replicas would lose their own state; call it without one");
  core_->begin_writing_values();
  bool changed = false;
  for (const auto& unit : core_->units)
    if (unit->group.outdated()) {
      unit->lay_out_again(core_->steps - core_->skipped_steps);
      changed = true;
    }
  // plug-ins refer to flat parameters that no longer exist; their state is dropped, too
  if (changed) core_->create_collectives();
  if (core_->resources.offload) core_->reserve_offload_chunks();
  if (core_->norm) core_->norm = std::make_unique<GradNorm>(*core_);
  core_->publish_values();
}

std::uint64_t Engine::steps() const { return core_->steps; }
std::uint64_t Engine::skipped_steps() const { return core_->skipped_steps; }
Model& Engine::model() const { return core_->model; }
const EngineOptions& Engine::options() const { return core_->options; }
const Mesh& Engine::mesh() const { return core_->resources.mesh; }
TraceRecorder& Engine::trace() { return core_->resources.trace; }

}  // namespace tessera::fsdp
