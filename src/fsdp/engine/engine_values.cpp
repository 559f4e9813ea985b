// Setting and reading the values of an engine, and its statistics.
#include <algorithm>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/fsdp/engine/module_buffers.h"
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {

using comm::OpKind;

void Engine::initialize(std::uint64_t seed) {
  begin_values();
  for (const auto& unit : units_) {
    unit->initialize(seed);
    unit->clear_optimizer();
    unit->set_anchor();
  }
  buffers_->initialize(seed);
  clear_plugin_state();
  apart_ = false;
  publish_values();
  set_steps(0);
}

void Engine::initialize(std::uint64_t seed, const ParameterLoader& own, const ParameterFilter& wanted) {
  initialize(seed);
  load(own, wanted);
}

void Engine::broadcast_from(int from, const ParameterLoader& fill, const ParameterFilter& wanted) {
  comm::HostCollectives& host = order_->host();
  if (from < 0 || from >= host.size())
    throw InvalidUsage("broadcast_from: rank " + std::to_string(from) + " of " + std::to_string(host.size()));
  agree("broadcast_from rank " + std::to_string(from));
  begin_values();
  for (const auto& unit : units_) {
    std::map<const nn::Parameter*, std::vector<float>> whole;
    for (const auto& parameter : unit->spec().parameters) {
      if (wanted && !wanted(*parameter)) continue;
      std::vector<float>& values = whole[parameter.get()];
      values.resize(static_cast<std::size_t>(parameter->count()));
      if (host.rank() == from) fill(*parameter, {0, parameter->count()}, values.data());
      if (host.size() == 1) continue;
      const comm::View view = comm::view_of(values.data(), values.size());
      host.exchange(view, view, [&](comm::ConstView in, comm::View out, comm::OpOptions options) {
        options.label = parameter->name();
        return host.communicator().broadcast(in, out, from, options);
      });
    }
    unit->load([&](const nn::Parameter& parameter, nn::ElementRange range,
                   float* out) { std::copy_n(whole.at(&parameter).data() + range.begin, range.count(), out); },
               wanted);
  }
  buffers_->broadcast(from);
  publish_values();
}

const std::vector<std::shared_ptr<nn::ModuleBuffer>>& Engine::buffers() const { return buffers_->all(); }

void Engine::fill_buffers(const std::function<void(const nn::ModuleBuffer&, void* out)>& fill,
                          const std::function<bool(const nn::ModuleBuffer&)>& wanted) {
  buffers_->fill(fill, wanted);
}

void Engine::for_each_gradient(const std::function<void(const GradientShard&)>& visitor) {
  if (gradients_ != Gradients::complete) throw InvalidUsage("for_each_gradient: no last backward came before");
  if (fabric_->offload && measures_norm())
    throw Unsupported("for_each_gradient: with cpu offload a norm is formed before gradients go to the host");
  finish_reductions();
  if (fabric_->offload) begin_values();
  for (const auto& unit : units_) unit->for_each_gradient(visitor);
  norm_parts_stale_ = measures_norm();
}

void Engine::load(const ParameterLoader& fill, const ParameterFilter& wanted) {
  begin_values();
  for (const auto& unit : units_) {
    unit->load(fill, wanted);
    unit->set_anchor();
  }
  publish_values();
}

void Engine::for_each_shard(const std::function<void(const ShardRange&)>& visitor) {
  begin_values();
  for (const auto& unit : units_) unit->for_each_shard(visitor);
}

void Engine::load_optimizer_state(
    const std::function<void(const nn::Parameter&, int state, nn::ElementRange, float*)>& fill,
    const ParameterFilter& wanted) {
  begin_values();
  for (const auto& unit : units_) unit->load_optimizer_state(fill, wanted);
}

void Engine::set_steps(std::uint64_t steps, std::uint64_t skipped, std::optional<bool> apart) {
  if (skipped > steps)
    throw InvalidUsage(std::to_string(skipped) + " of " + std::to_string(steps) + " steps can't have been skipped");
  if (apart)
    apart_ = *apart && period() > 1;
  else if (steps != steps_)
    apart_ = steps % period() != 0;
  steps_ = steps;
  skipped_steps_ = skipped;
}

int Engine::states() const { return nn::state_slots(options_.optimizer); }

void Engine::begin_values() {
  wait();
  if (fabric_->offload) fabric_->compute().synchronize();  // the host itself writes to memory that copies read
}

void Engine::publish_values() {
  const Event written = fabric_->compute().record();
  fabric_->gather_stream->wait(written);
  if (fabric_->offload) fabric_->offload->up().wait(written);
}

void Engine::for_each_parameter(const Visitor& visitor) {
  struct Item {
    ParamGroup* unit;
    const nn::Parameter* parameter;
  };
  std::vector<Item> items;
  for (const auto& unit : units_)
    for (const auto& parameter : unit->spec().parameters) items.push_back({unit.get(), parameter.get()});
  fabric_->join_offload();
  std::sort(items.begin(), items.end(),
            [](const Item& a, const Item& b) { return a.parameter->name() < b.parameter->name(); });
  ParamGroup* open = nullptr;
  for (const Item& item : items) {
    if (item.unit != open) {
      if (open != nullptr) open->close_values();
      open = item.unit;
      open->gather_full();
    }
    open->download_values(*item.parameter, [&](std::span<const float> values) { visitor(*item.parameter, values); });
  }
  if (open != nullptr) open->close_values();
}

std::vector<std::shared_ptr<nn::Parameter>> Engine::parameters() const {
  std::vector<std::shared_ptr<nn::Parameter>> all;
  for (const auto& unit : units_) all.insert(all.end(), unit->spec().parameters.begin(), unit->spec().parameters.end());
  return all;
}

void Engine::require_graphable() const {
  const auto refuse = [](const std::string& why) { throw InvalidUsage("graphs: " + why); };
  if (fabric_->mesh.size() > 1)
    refuse(std::to_string(fabric_->mesh.size()) + " ranks wait for each other on several streams; use one rank");
  if (fabric_->offload) refuse("cpu offload brings parameters on another stream; leave it out");
  for (const auto& unit : units_)
    if (unit->casts())
      refuse("gradients pass through buffers that are lent; reduce them in the type of the parameters");
}

std::vector<Engine::UnitStats> Engine::units() const {
  std::vector<UnitStats> infos;
  for (std::size_t i = 0; i < units_.size(); ++i)
    infos.push_back({units_[i]->name(), units_[i]->elements(), units_[i]->padding(), units_[i]->kept_after_forward(),
                     units_[i]->spec().is_root, strategies_[i], units_[i]->peak_bytes()});
  return infos;
}

std::vector<UnitSize> Engine::unit_sizes() const {
  std::vector<UnitSize> sizes;
  for (const auto& unit : units_) {
    UnitSize& size = sizes.emplace_back();
    size.kept_after_forward = unit->kept_after_forward();
    size.is_root = unit->spec().is_root;
    for (const FlatLayout* layout : unit->layouts()) add_flat(size, *layout, model_.dtype(), options_.reduce_dtype);
  }
  return sizes;
}

int Engine::rank() const { return fabric_->mesh.rank(); }
const MeshShape& Engine::mesh() const { return fabric_->mesh.shape(); }
std::uint64_t Engine::copied_bytes() const { return fabric_->copier.copied_bytes(); }
OffloadBytes Engine::offload_bytes() const {
  return {fabric_->copier.uploaded_bytes(), fabric_->copier.downloaded_bytes()};
}
TraceRecorder& Engine::recorder() { return fabric_->recorder; }

namespace {

void add(comm::TrafficStats::TrafficCount& line, const comm::TrafficStats::TrafficCount& more) {
  line.calls += more.calls;
  line.bytes_sent += more.bytes_sent;
}

comm::TrafficStats::TrafficCount difference(const comm::TrafficStats::TrafficCount& a,
                                            const comm::TrafficStats::TrafficCount& b) {
  return {a.calls - b.calls, a.bytes_sent - b.bytes_sent};
}

}  // namespace

EngineTraffic EngineTraffic::operator-(const EngineTraffic& earlier) const {
  return {difference(all_gather, earlier.all_gather), difference(reduce_scatter, earlier.reduce_scatter),
          difference(all_reduce, earlier.all_reduce), difference(control, earlier.control),
          difference(broadcast, earlier.broadcast)};
}

std::uint64_t Engine::control_formula_bytes() const {
  std::uint64_t bytes = 0;
  if (measures_norm())
    for (const ShardingPlan::AxisSlice& cut : norm_cuts_)
      bytes += comm::direct_bytes_sent(OpKind::all_reduce, norm_slots_, sizeof(double), cut.size, 0);
  bytes += order_->formula_bytes();
  return bytes;
}

std::uint64_t Engine::buffer_formula_bytes() const {
  return options_.buffers == BufferSync::own ? 0 : buffers_->formula_bytes();
}

/// A plug-in may implement a collective by operations of other kinds, so traffic is attributed by communicator. Where
/// units differ in what they do over an axis, reductions of the other kind are counted as what they are.
EngineTraffic Engine::traffic() const {
  EngineTraffic traffic;
  for (const auto& [axis, channels] : fabric_->mesh.all_channels()) {
    const comm::TrafficStats gathers = channels.gather->meter();
    add(traffic.all_gather, {gathers.calls(), gathers.bytes_sent()});
    bool scatters = false;
    for (const ReduceStage& stage : units_.front()->plan().reductions)
      if (stage.axis == axis) scatters = stage.scatter;
    const comm::TrafficStats reduce = channels.reduce->meter();
    const comm::TrafficStats::TrafficCount other = reduce.of(scatters ? OpKind::all_reduce : OpKind::reduce_scatter);
    add(scatters ? traffic.all_reduce : traffic.reduce_scatter, other);
    add(scatters ? traffic.reduce_scatter : traffic.all_reduce,
        difference({reduce.calls(), reduce.bytes_sent()}, other));
    const comm::TrafficStats control = channels.control->meter();
    add(traffic.control, {control.calls(), control.bytes_sent()});
  }
  const comm::TrafficStats order = order_->host().communicator().meter();
  add(traffic.control, {order.calls(), order.bytes_sent()});
  traffic.broadcast = buffers_->traffic();
  return traffic;
}

}  // namespace tessera::fsdp
