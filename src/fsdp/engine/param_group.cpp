#include "tessera/fsdp/engine/param_group.h"

#include <algorithm>

#include "tessera/fsdp/engine/engine_resources.h"

namespace tessera::fsdp {

using comm::OpKind;

namespace {

/// The sum of what `of` returns for each flat parameter.
template <class Of>
auto sum_of(const std::vector<FlatParameter>& flats, const Of& of) {
  decltype(of(flats.front())) sum = 0;
  for (const FlatParameter& flat : flats) sum += of(flat);
  return sum;
}

}  // namespace

ParamGroup::ParamGroup(EngineResources& resources, UnitSpec spec, ShardingPlan plan, int optimizer_slots)
    : resources_(resources), spec_(std::move(spec)), plan_(std::move(plan)), optimizer_slots_(optimizer_slots) {
  lay_out();
}

void ParamGroup::lay_out() {
  flats_.clear();
  state_ = State::sharded;
  for (FlatLayout& layout : make_layouts(spec_.parameters, resources_.mesh.size()))
    flats_.emplace_back(resources_, plan_, std::move(layout), optimizer_slots_);
  if (plan_.unshards_to_lease) {
    reshard();
  } else {
    for (FlatParameter& flat : flats_) flat.bind_parameters(flat.values.data());
    state_ = State::unsharded;
  }
}

bool ParamGroup::outdated() const {
  for (const FlatParameter& flat : flats_)
    for (const FlatEntry& entry : flat.layout.entries)
      if (entry.parameter->requires_grad() != flat.trainable()) return true;
  return false;
}

std::int64_t ParamGroup::elements() const {
  return sum_of(flats_, [](const auto& f) { return f.layout.elements; });
}
std::int64_t ParamGroup::padding() const {
  return sum_of(flats_, [](const auto& f) { return f.layout.padding(); });
}
std::size_t ParamGroup::bytes() const {
  return sum_of(flats_, [](const auto& f) { return f.layout.bytes(); });
}

void ParamGroup::update_peak_bytes() {
  peak_bytes_ = std::max(peak_bytes_, sum_of(flats_, [](const auto& f) { return f.leased_bytes(); }));
}

std::vector<TransferSpec> ParamGroup::transfers_of(OpKind collective) const {
  std::vector<TransferSpec> transfers;
  const auto add = [&](const FlatParameter& flat, const Axis& axis, DType dtype, std::int64_t elements) {
    std::string each = name() + "/" + axis;
    if (flats_.size() > 1) each += "/" + std::to_string(&flat - flats_.data());
    transfers.push_back({std::move(each), &flat.layout, dtype, elements, resources_.mesh.shape().size_of(axis)});
  };
  for (const FlatParameter& flat : flats_) {
    const std::int64_t padded = flat.layout.padded;
    if (collective == OpKind::all_gather) {
      if (flat.quantized() && !resources_.collectives.gathers_quantized()) continue;
      for (std::size_t i = 0; i < plan_.gather_axes.size(); ++i)
        add(flat, plan_.gather_axes[i], flat.layout.dtype, plan_.unsharded(padded, i + 1).count());
      for (std::size_t i = 0; flat.trainable() && i < plan_.gather_after_step.size(); ++i)
        add(flat, plan_.gather_after_step[i], flat.layout.dtype, plan_.after_gathers(padded, i + 1).count());
      continue;
    }
    if (!flat.trainable()) continue;
    if (plan_.periodic && plan_.periodic->replicas > 1 && collective == OpKind::all_reduce)
      add(flat, plan_.periodic->axis, DType::f32, flat.optimized.count());
    std::int64_t elements = padded;
    for (const ReduceStage& stage : plan_.reductions) {
      if (stage.scatter == (collective == OpKind::reduce_scatter))
        add(flat, stage.axis, flat.precision.reduce, elements);
      if (stage.scatter) elements /= resources_.mesh.shape().size_of(stage.axis);
    }
  }
  return transfers;
}

void ParamGroup::unshard() {
  if (state_ != State::sharded) return;
  Stream& stream = *resources_.gather_stream;
  Stream& first = plan_.offloaded.parameters ? resources_.offload->up() : stream;
  const TraceRecorder::Span span = resources_.trace.begin(TraceEventKind::unshard_issue, name(), bytes(), stream);
  wait_for_round(stream);  // of gathers over another axis that the optimizer step started
  stream.wait(updated_);
  first.wait(stored_);
  const bool has_secondary = static_cast<bool>(flats_.front().secondary);
  for (FlatParameter& flat : flats_) lease_for_gather(flat, first);
  update_peak_bytes();
  gather(has_secondary ? plan_.rest_slices.size() - plan_.forward_slices.size() : 0);
  resources_.trace.end(span, stream);
  state_ = State::unsharding;
}

void ParamGroup::lease_for_gather(FlatParameter& flat, Stream& stream) {
  flat.unsharded = resources_.parameters.acquire(flat.layout.bytes(), name(), stream);
  if (!plan_.keeps_secondary || kept_after_forward_ || flat.secondary) return;
  const ElementRange part = narrow({0, flat.layout.padded}, plan_.forward_slices);
  flat.secondary = resources_.parameters.acquire(static_cast<std::size_t>(part.count()) * size_of(flat.layout.dtype),
                                                 name(), stream);
}

/// The buffer of a flat parameter after so many gathers: its place in the unsharded parameter, or the secondary shard
/// that stays for the backward.
ParamGroup::GatherTarget ParamGroup::target_after(FlatParameter& flat, std::size_t gathers) {
  const bool whole = gathers == plan_.rest_slices.size();
  if (whole || !flat.secondary || gathers > plan_.rest_slices.size() - plan_.forward_slices.size())
    return {&flat.unsharded, 0};
  return {&flat.secondary, narrow({0, flat.layout.padded}, plan_.forward_slices).begin};
}

/// The input of the first gather: the shard at rest; if offloaded, uploaded to its place in the first result, so that
/// the gather is in place.
const void* ParamGroup::first_input(FlatParameter& flat) {
  if (!plan_.offloaded.parameters) return flat.values.data();
  void* const place = target_after(flat, std::min<std::size_t>(1, plan_.rest_slices.size())).at(flat, flat.rest.begin);
  resources_.copier.upload(resources_.offload->up(), place, flat.values.data(), flat.values.bytes());
  return place;
}

/// Gathers over one axis after the other; the first `already` are done.
void ParamGroup::gather(std::size_t already) {
  Stream& stream = *resources_.gather_stream;
  std::vector<const void*> inputs;
  if (already == 0) {
    for (FlatParameter& flat : flats_) inputs.push_back(first_input(flat));
    if (plan_.offloaded.parameters) {
      loaded_ = resources_.offload->up().record();
      stream.wait(loaded_);
    }
  }
  for (std::size_t i = already; i < plan_.gather_axes.size(); ++i) {
    if (i > already) wait_for_round(stream);  // the next axis gathers what this one completes
    gather_axis(i, inputs);
  }
}

/// `inputs`: of the first gather.
void ParamGroup::gather_axis(std::size_t index, const std::vector<const void*>& inputs) {
  const Device device = resources_.device();
  EngineCollectives& collectives = resources_.collectives;
  std::vector<FlatTransfer> transfers, quantized;
  for (std::size_t f = 0; f < flats_.size(); ++f) {
    FlatParameter& flat = flats_[f];
    const ElementRange part = plan_.unsharded(flat.layout.padded, index);
    const ElementRange whole = plan_.unsharded(flat.layout.padded, index + 1);
    const DType dtype = flat.layout.dtype;
    const void* const from = index == 0 ? inputs[f] : target_after(flat, index).at(flat, part.begin);
    void* const to = target_after(flat, index + 1).at(flat, whole.begin);
    (flat.quantized() && !collectives.gathers_quantized() ? quantized : transfers)
        .push_back({{from, static_cast<std::size_t>(part.count()), dtype, device},
                    {to, static_cast<std::size_t>(whole.count()), dtype, device},
                    &flat.layout});
  }
  const CollectiveCall call{*resources_.mesh.channels(plan_.gather_axes[index]).gather,
                            transfers,
                            {},
                            {.after = resources_.gather_stream.get(), .label = name()},
                            resources_.copier};
  gathers_ = transfers.empty() ? WorkChain() : collectives.all_gather().run(call);
  for (const FlatTransfer& transfer : quantized) {
    gathers_.add(start_plain(OpKind::all_gather, call, transfer));
    collectives.add_quantized_bytes(plain_bytes(OpKind::all_gather, transfer, call.channel.size()));
  }
}

/// Where the host computes, it waits for the round, too, and that time is exposed; a device's gathers have a stream of
/// their own.
void ParamGroup::wait_for_round(Stream& stream) {
  if (gathers_.empty()) return;
  if (!stream.immediate()) return gathers_.wait_on(stream);
  const TraceRecorder::Span span = resources_.trace.begin(TraceEventKind::unshard_wait, name(), bytes(), stream);
  gathers_.wait_on(stream);
  resources_.trace.end(span, stream);
}

void ParamGroup::wait_for_gather() {
  resources_.compute().wait(loaded_);
  gathers_.wait_on(resources_.compute());
}

void ParamGroup::wait_for_unshard() {
  if (state_ == State::unsharded) return;
  unshard();
  Stream& stream = resources_.compute();
  const TraceRecorder::Span span = resources_.trace.begin(TraceEventKind::unshard_wait, name(), bytes(), stream);
  wait_for_gather();
  resources_.trace.end(span, stream);
  for (FlatParameter& flat : flats_)
    if (flat.unsharded) flat.bind_parameters(flat.unsharded.data());
  state_ = State::unsharded;
}

void ParamGroup::wait_for_gathers() {
  if (state_ == State::unsharding && !plan_.unshards_to_lease) wait_for_unshard();
  if (!gathers_.empty()) gathers_.wait_on(resources_.compute());
}

void ParamGroup::reshard(bool for_backward) {
  if (!plan_.unshards_to_lease) return;
  if (state_ == State::unsharding) wait_for_gather();  // it was not used, but the next lease reuses its memory
  for (FlatParameter& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) entry.parameter->unbind("unit " + name() + " is resharded");
    if (flat.unsharded) flat.unsharded.release(resources_.compute().record());
    if (flat.secondary && !for_backward) flat.secondary.release(resources_.compute().record());
  }
  if (state_ == State::unsharded) resources_.trace.mark(TraceEventKind::reshard, name(), bytes(), resources_.compute());
  state_ = State::sharded;
}

void ParamGroup::all_gather_updated() {
  updated_ = resources_.compute().record();
  const std::vector<Axis>& axes = plan_.gather_after_step;
  if (axes.empty()) return;
  Stream& stream = *resources_.gather_stream;
  stream.wait(updated_);
  const TraceRecorder::Span span = resources_.trace.begin(TraceEventKind::unshard_issue, name(), bytes(), stream);
  for (std::size_t i = 0; i < axes.size(); ++i) {
    std::vector<FlatTransfer> transfers;
    for (FlatParameter& flat : flats_) {
      if (!flat.trainable()) continue;
      const auto view = [&](ElementRange range) {
        return comm::View{flat.value_at(range.begin), static_cast<std::size_t>(range.count()), flat.layout.dtype,
                          resources_.device()};
      };
      transfers.push_back({view(plan_.after_gathers(flat.layout.padded, i)),
                           view(plan_.after_gathers(flat.layout.padded, i + 1)), &flat.layout});
    }
    if (i > 0) wait_for_round(stream);  // an outer axis gathers what the inner one has completed
    gathers_ = resources_.collectives.all_gather().run({*resources_.mesh.channels(axes[i]).gather,
                                                        transfers,
                                                        {},
                                                        {.after = &stream, .label = name()},
                                                        resources_.copier});
  }
  resources_.trace.end(span, stream);
  state_ = plan_.unshards_to_lease ? State::sharded : State::unsharding;
}

void ParamGroup::reset() {
  gathers_ = WorkChain();
  if (plan_.unshards_to_lease) {
    state_ = State::unsharding;  // whatever the state was, reshard() releases the leases
    reshard();
  } else {
    state_ = State::unsharded;
  }
}

FlatParameter::FlatParameter(EngineResources& resources, const ShardingPlan& plan, FlatLayout the_layout,
                             int optimizer_slots)
    : layout(std::move(the_layout)),
      rest(plan.rest(layout.padded)),
      kept(plan.gradient_range(layout.padded)),
      optimized(plan.optimizer(layout.padded)) {
  using Transfer = EngineResources::Transfer;
  const auto allocate_zeroed = [&](ElementRange range, DType dtype, MemoryCategory use, bool offloaded,
                                   Transfer transfer = Transfer::none) {
    const std::size_t bytes = static_cast<std::size_t>(range.count()) * size_of(dtype);
    if (offloaded) return resources.offload->allocate(bytes);
    Buffer buffer = resources.allocate(bytes, use, transfer);
    resources.zero(resources.compute(), buffer.data(), buffer.bytes());
    return buffer;
  };
  if (trainable()) precision = make_precision(layout.dtype, resources.reduce_dtype);
  const bool gathers = !plan.gather_axes.empty() || !plan.gather_after_step.empty();
  values = allocate_zeroed(rest, layout.dtype, MemoryCategory::parameter, plan.offloaded.parameters,
                           gathers ? Transfer::gathered : Transfer::none);
  if (!trainable()) return;
  gradient =
      allocate_zeroed(kept, precision.reduce, MemoryCategory::gradient, plan.offloaded.gradients, Transfer::reduced);
  const auto allocate_state = [&] {
    return allocate_zeroed(optimized, DType::f32, MemoryCategory::optimizer, plan.offloaded.optimizer);
  };
  for (int i = 0; i < optimizer_slots; ++i) state.push_back(allocate_state());
  if (precision.has_master_weights()) master_weights = allocate_state();
  if (plan.periodic) anchor = allocate_state();
  if (plan.periodic && plan.periodic->has_momentum()) outer_momentum = allocate_state();
}

std::size_t FlatParameter::leased_bytes() const {
  return unsharded.bytes() + secondary.bytes() + written_gradient.bytes() + full_gradient.bytes();
}

void FlatParameter::bind_parameters(void* base) {
  for (const FlatEntry& entry : layout.entries) entry.parameter->bind(at(base, layout.dtype, entry.offset));
}

void FlatParameter::bind_gradients(void* base, bool keep) {
  written_at = base;
  for (const FlatEntry& entry : layout.entries)
    entry.parameter->bind_gradient(at(base, layout.dtype, entry.offset), keep);
}

}  // namespace tessera::fsdp
