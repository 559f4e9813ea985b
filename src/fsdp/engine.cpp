#include "tessera/fsdp/engine.h"

#include <cmath>
#include <exception>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp/engine/engine_core.h"
#include "tessera/fsdp/engine/unit_scheduler.h"
#include "tessera/fsdp/engine_stats.h"
#include "tessera/fsdp/gradient_scaler.h"

namespace tessera::fsdp {
namespace {

using TrafficCount = comm::TrafficStats::TrafficCount;

void add(TrafficCount& sum, const TrafficCount& more) {
  sum.calls += more.calls;
  sum.bytes_sent += more.bytes_sent;
}

TrafficCount difference(const TrafficCount& a, const TrafficCount& b) {
  return {a.calls - b.calls, a.bytes_sent - b.bytes_sent};
}

TrafficCount total(const comm::TrafficStats& stats) { return {stats.calls(), stats.bytes_sent()}; }

}  // namespace

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

EngineTraffic EngineTraffic::operator-(const EngineTraffic& earlier) const {
  return {difference(all_gather, earlier.all_gather), difference(reduce_scatter, earlier.reduce_scatter),
          difference(all_reduce, earlier.all_reduce), difference(control, earlier.control),
          difference(broadcast, earlier.broadcast)};
}

std::vector<UnitStats> EngineStats::units() const {
  std::vector<UnitStats> all;
  for (const auto& unit : core_.units) {
    const ParamGroup& group = unit->group;
    all.push_back({group.name(), group.elements(), group.padding(), group.kept_after_forward(), group.spec().is_root,
                   unit->strategy, group.peak_bytes()});
  }
  return all;
}

std::vector<UnitSize> EngineStats::unit_sizes() const {
  std::vector<UnitSize> sizes;
  for (const auto& unit : core_.units) {
    UnitSize& size = sizes.emplace_back();
    size.kept_after_forward = unit->group.kept_after_forward();
    size.is_root = unit->group.spec().is_root;
    for (const FlatParameter& flat : unit->group.flats())
      add_flat(size, flat.layout, core_.model.root().dtype(), core_.options.reduce_dtype);
  }
  return sizes;
}

/// A plug-in may implement a collective by operations of other kinds, so traffic is attributed by communicator. Where
/// units differ in what they do over an axis, reductions of the other kind are counted as what they are.
EngineTraffic EngineStats::traffic() const {
  EngineTraffic traffic;
  for (const auto& [axis, channels] : core_.resources.mesh.all_channels()) {
    bool scatters = false;
    for (const ReduceStage& stage : core_.units.front()->plan().reductions)
      if (stage.axis == axis) scatters = stage.scatter;
    const comm::TrafficStats reduce = channels.reduce->traffic();
    const TrafficCount other = reduce.of(scatters ? comm::OpKind::all_reduce : comm::OpKind::reduce_scatter);
    add(scatters ? traffic.all_reduce : traffic.reduce_scatter, other);
    add(scatters ? traffic.reduce_scatter : traffic.all_reduce, difference(total(reduce), other));
    add(traffic.all_gather, total(channels.gather->traffic()));
    add(traffic.control, total(channels.control->traffic()));
  }
  add(traffic.control, total(core_.order->host().communicator().traffic()));
  traffic.broadcast = core_.buffers->traffic();
  return traffic;
}

std::uint64_t EngineStats::control_formula_bytes() const {
  return (core_.norm ? core_.norm->formula_bytes() : 0) + core_.order->formula_bytes();
}

std::uint64_t EngineStats::buffer_formula_bytes() const { return core_.buffers->formula_bytes(core_.options.buffers); }

std::uint64_t EngineStats::copied_bytes() const { return core_.resources.copier.copied_bytes(); }

OffloadBytes EngineStats::offload_bytes() const {
  return {core_.resources.copier.uploaded_bytes(), core_.resources.copier.downloaded_bytes()};
}

CollectiveStats EngineStats::collective_stats(comm::OpKind collective) const {
  return core_.resources.collectives.stats(collective);
}

GradientScaler::GradientScaler(Engine& engine, Options options) : engine_(engine), options_(options) {
  if (!(options_.growth > 1) || !(options_.backoff > 0) || !(options_.backoff < 1) || options_.interval < 1)
    throw InvalidUsage("gradient scaler: growth " + std::to_string(options_.growth) + ", backoff " +
                       std::to_string(options_.backoff) + ", interval " + std::to_string(options_.interval) +
                       "; growth must be above 1, backoff between 0 and 1, interval 1 or more");
  set_state({.scale = options_.initial});
}

void GradientScaler::set_state(const State& state) {
  engine_.state().set_steps(engine_.steps(), state.skipped_steps);
  engine_.set_loss_scale(state.scale);
  state_ = state;
}

bool GradientScaler::after_step() {
  State next = state_;
  const bool done = std::isfinite(engine_.grad_norm());
  if (!done) {
    next = {.scale = state_.scale * options_.backoff, .skipped_steps = state_.skipped_steps + 1};
  } else if (++next.good_steps == options_.interval) {
    next.scale *= options_.growth;
    next.good_steps = 0;
  }
  // A scale near the limits of f32 would itself cause overflow or underflow.
  next.scale = std::fmin(std::fmax(next.scale, 0x1p-24), 0x1p96);
  set_state(next);
  return done;
}

}  // namespace tessera::fsdp
