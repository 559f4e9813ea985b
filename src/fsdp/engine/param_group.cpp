#include "tessera/fsdp/engine/param_group.h"

#include <algorithm>

namespace tessera::fsdp {
namespace {

/// Runs of equal weight decay and age inside `range`; padding joins the run before it (it is zero and stays zero).
template <class UpdateRange>
std::vector<UpdateRange> runs_in(const FlatLayout& layout, ElementRange range,
                                 const std::map<const nn::Parameter*, std::uint64_t>& trained_since) {
  std::vector<UpdateRange> runs;
  for (const FlatEntry& entry : layout.entries) {
    const std::int64_t begin = std::max(range.begin, entry.offset);
    const std::int64_t end = std::min(range.end, entry.end());
    if (begin >= end) continue;
    const bool decay = entry.parameter->decays();
    const auto found = trained_since.find(entry.parameter.get());
    const std::uint64_t since = found == trained_since.end() ? 0 : found->second;
    if (!runs.empty() && runs.back().decay == decay && runs.back().since == since) {
      runs.back().range.end = end;
    } else {
      runs.push_back({{begin, end}, decay, since});
    }
  }
  return runs;
}

}  // namespace

Buffer EngineResources::allocate(std::size_t bytes, std::optional<MemoryCategory> use) {
  comm::Communicator& world = mesh.world();
  base::DeviceRuntime& runtime = context.runtime();
  if (runtime.host_accessible()) return world.allocate(bytes, comm::MemoryKind::host, use);
  const std::vector<comm::MemoryKind>& kinds = world.capabilities().memory;
  if (std::find(kinds.begin(), kinds.end(), comm::MemoryKind::device) != kinds.end())
    return world.allocate(bytes, comm::MemoryKind::device, use);
  MemoryTracker& memory_tracker = context.memory_tracker();
  void* data = runtime.allocate(bytes);
  if (use) memory_tracker.add(*use, bytes);
  return {data, bytes, [&runtime, &memory_tracker, use](void* p, std::size_t n) {
            runtime.free(p, n);
            if (use) memory_tracker.remove(*use, n);
          }};
}

void EngineResources::join_offload() {
  if (offload == nullptr) return;
  compute().wait(offload->up().record());
  compute().wait(offload->down().record());
}

ParamGroup::ParamGroup(EngineResources& fabric, UnitSpec spec, ShardingPlan plan, int optimizer_slots)
    : fabric_(fabric), spec_(std::move(spec)), plan_(std::move(plan)), slots_(optimizer_slots) {
  lay_out();
}

void ParamGroup::lay_out() {
  for (FlatLayout& layout : make_layouts(spec_.parameters, fabric_.mesh.size())) {
    FlatParameter& flat = flats_.emplace_back();
    if (layout.trainable) flat.precision = make_precision(layout.dtype, fabric_.reduce_dtype);
    flat.layout = std::move(layout);
    allocate(flat);
  }
  if (plan_.unshards_to_lease) {
    reshard();
  } else {
    for (FlatParameter& flat : flats_) bind_parameters(flat, flat.values.data());
    state_ = State::ready;
  }
}

void ParamGroup::allocate(FlatParameter& flat) {
  const std::int64_t padded = flat.layout.padded;
  flat.rest = plan_.rest(padded);
  flat.kept = plan_.gradient_range(padded);
  flat.optimized = plan_.optimizer(padded);
  const auto allocate_zeroed = [&](ElementRange range, DType dtype, MemoryCategory use, bool offloaded) {
    const std::size_t bytes = static_cast<std::size_t>(range.count()) * size_of(dtype);
    if (offloaded) return fabric_.offload->allocate(bytes);
    Buffer buffer = fabric_.allocate(bytes, use);
    fabric_.zero(fabric_.compute(), buffer.data(), buffer.bytes());
    return buffer;
  };
  flat.values = allocate_zeroed(flat.rest, flat.layout.dtype, MemoryCategory::parameter, plan_.offloaded.parameters);
  if (!flat.layout.trainable) return;
  flat.gradient =
      allocate_zeroed(flat.kept, flat.precision.reduce, MemoryCategory::gradient, plan_.offloaded.gradients);
  const auto allocate_state = [&] {
    return allocate_zeroed(flat.optimized, DType::f32, MemoryCategory::optimizer, plan_.offloaded.optimizer);
  };
  for (int i = 0; i < slots_; ++i) flat.state.push_back(allocate_state());
  if (flat.precision.has_master_weights()) flat.masters = allocate_state();
  if (plan_.periodic) flat.anchor = allocate_state();
  if (plan_.periodic && plan_.periodic->has_momentum()) flat.outer_momentum = allocate_state();
  find_runs(flat);
}

void ParamGroup::find_runs(FlatParameter& flat) {
  flat.runs = runs_in<FlatParameter::UpdateRange>(flat.layout, flat.optimized, trained_since_);
}

std::int64_t ParamGroup::elements() const {
  std::int64_t sum = 0;
  for (const FlatParameter& flat : flats_) sum += flat.layout.elements;
  return sum;
}

std::int64_t ParamGroup::padding() const {
  std::int64_t sum = 0;
  for (const FlatParameter& flat : flats_) sum += flat.layout.padding();
  return sum;
}

std::vector<const FlatLayout*> ParamGroup::layouts() const {
  std::vector<const FlatLayout*> all;
  for (const FlatParameter& flat : flats_) all.push_back(&flat.layout);
  return all;
}

std::size_t ParamGroup::bytes() const {
  std::size_t sum = 0;
  for (const FlatParameter& flat : flats_) sum += flat.layout.bytes();
  return sum;
}

bool ParamGroup::casts() const {
  return std::any_of(flats_.begin(), flats_.end(), [](const FlatParameter& flat) { return flat.precision.casts(); });
}

// --- parameters

void ParamGroup::bind_parameters(FlatParameter& flat, void* base) {
  for (const FlatEntry& entry : flat.layout.entries) {
    nn::Tensor tensor = entry.parameter->tensor();
    tensor.bind(FlatParameter::at(base, flat.layout.dtype, entry.offset));
  }
}

void ParamGroup::unshard() {
  if (state_ != State::sharded) return;
  Stream& stream = *fabric_.gather_stream;
  const bool offloaded = plan_.offloaded.parameters;
  Stream& first = offloaded ? fabric_.offload->up() : stream;
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::unshard_issue, name(), bytes(), stream);
  if (!gathers_.empty()) gathers_.wait_on(stream);  // gathers over another axis that the optimizer step started
  stream.wait(updated_);
  first.wait(stored_);
  const bool has_secondary = static_cast<bool>(flats_.front().secondary);
  for (FlatParameter& flat : flats_) lease_for_gather(flat, first);
  note_leases();
  gather(has_secondary ? plan_.rest_cuts.size() - plan_.forward_cuts.size() : 0);
  fabric_.recorder.end(span, stream);
  state_ = State::gathering;
}

void ParamGroup::note_leases() {
  std::size_t bytes = 0;
  for (const FlatParameter& flat : flats_)
    for (const Lease* lease : {&flat.unsharded, &flat.secondary, &flat.written_gradient, &flat.full_gradient})
      if (*lease) bytes += lease->bytes();
  peak_bytes_ = std::max(peak_bytes_, bytes);
}

void ParamGroup::lease_for_gather(FlatParameter& flat, Stream& stream) {
  flat.unsharded = fabric_.parameters->acquire(flat.layout.bytes(), name(), stream);
  if (!plan_.keeps_secondary || kept_after_forward_ || flat.secondary) return;
  const ElementRange part = narrow({0, flat.layout.padded}, plan_.forward_cuts);
  flat.secondary =
      fabric_.parameters->acquire(static_cast<std::size_t>(part.count()) * size_of(flat.layout.dtype), name(), stream);
}

/// The buffer of a flat parameter after `gathered` gathers: its place in the unsharded parameter, or the secondary
/// shard that stays for the backward.
ParamGroup::GatherTarget ParamGroup::gathered_to(FlatParameter& flat, std::size_t gathered) {
  const bool whole = gathered == plan_.rest_cuts.size();
  if (whole || !flat.secondary || gathered > plan_.rest_cuts.size() - plan_.forward_cuts.size())
    return {&flat.unsharded, 0};
  return {&flat.secondary, narrow({0, flat.layout.padded}, plan_.forward_cuts).begin};
}

/// The input of the first gather: the shard at rest; if offloaded, uploaded to its place in the first result, so that
/// the gather is in place.
const void* ParamGroup::part_to_gather(FlatParameter& flat) {
  if (!plan_.offloaded.parameters) return flat.values.data();
  void* const place = gathered_to(flat, std::min<std::size_t>(1, plan_.rest_cuts.size())).of(flat, flat.rest.begin);
  fabric_.copier.upload(fabric_.offload->up(), place, flat.values.data(), flat.values.bytes());
  return place;
}

/// Gathers over one axis after the other; the first `already` are done.
void ParamGroup::gather(std::size_t already) {
  Stream& stream = *fabric_.gather_stream;
  std::vector<const void*> parts;
  if (already == 0) {
    for (FlatParameter& flat : flats_) parts.push_back(part_to_gather(flat));
    if (plan_.offloaded.parameters) {
      loaded_ = fabric_.offload->up().record();
      stream.wait(loaded_);
    }
  }
  for (std::size_t i = already; i < plan_.gather_axes.size(); ++i) {
    std::vector<FlatTransfer> transfers, encodings;
    for (FlatParameter& flat : flats_) {
      const ElementRange part = plan_.unsharded(flat.layout.padded, i);
      const ElementRange whole = plan_.unsharded(flat.layout.padded, i + 1);
      const DType dtype = flat.layout.dtype;
      const void* const from =
          i == 0 ? parts[static_cast<std::size_t>(&flat - flats_.data())] : gathered_to(flat, i).of(flat, part.begin);
      std::vector<FlatTransfer>& list = flat.encoded() && !fabric_.carries_encodings ? encodings : transfers;
      list.push_back({{from, static_cast<std::size_t>(part.count()), dtype, fabric_.device()},
                              {gathered_to(flat, i + 1).of(flat, whole.begin), static_cast<std::size_t>(whole.count()),
                               dtype, fabric_.device()},
                              &flat.layout});
    }
    if (i > already) gathers_.wait_on(stream);  // the next axis gathers what this one completes
    const CollectiveCall call{*fabric_.mesh.channels(plan_.gather_axes[i]).gather,
                              transfers,
                              {},
                              {.after = &stream, .label = name()},
                              fabric_.copier};
    gathers_ = transfers.empty() ? WorkChain() : fabric_.all_gather->run(call);
    for (const FlatTransfer& encoding : encodings) {
      gathers_.add(start_plain(comm::OpKind::all_gather, call, encoding));
      fabric_.encodings_sent += plain_bytes(comm::OpKind::all_gather, encoding, call.channel.size());
    }
  }
}

void ParamGroup::wait_for_gather() {
  fabric_.compute().wait(loaded_);
  gathers_.wait_on(fabric_.compute());
}

void ParamGroup::wait_for_unshard() {
  if (state_ == State::ready) return;
  unshard();
  Stream& stream = fabric_.compute();
  const TraceRecorder::Span span = fabric_.recorder.begin(TraceEventKind::unshard_wait, name(), bytes(), stream);
  wait_for_gather();
  fabric_.recorder.end(span, stream);
  for (FlatParameter& flat : flats_)
    if (flat.unsharded) bind_parameters(flat, flat.unsharded.data());
  state_ = State::ready;
}

void ParamGroup::settle() {
  if (state_ == State::gathering && !plan_.unshards_to_lease) wait_for_unshard();
  if (!gathers_.empty()) gathers_.wait_on(fabric_.compute());
}

void ParamGroup::reshard(bool for_backward) {
  if (!plan_.unshards_to_lease) return;
  if (state_ == State::gathering) wait_for_gather();  // it was not used, but the next lease reuses its memory
  for (FlatParameter& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) {
      nn::Tensor tensor = entry.parameter->tensor();
      tensor.unbind("unit " + name() + " is resharded");
    }
    if (flat.unsharded) flat.unsharded.give_back(fabric_.compute().record());
    if (flat.secondary && !for_backward) flat.secondary.give_back(fabric_.compute().record());
  }
  if (state_ == State::ready) fabric_.recorder.mark(TraceEventKind::reshard, name(), bytes(), fabric_.compute());
  state_ = State::sharded;
}

void ParamGroup::reset() {
  gathers_ = WorkChain();
  reductions_ = WorkChain();
  stage_ = kIdle;
  has_gradients_ = held_ = accumulated_ = false;
  for (FlatParameter& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) entry.parameter->gradient().unbind();
    if (flat.full_gradient) flat.full_gradient.give_back(Event());
    if (flat.written_gradient) flat.written_gradient.give_back(Event());
    if (flat.delta) flat.delta.give_back(Event());
    flat.shown = Buffer();
  }
  if (plan_.unshards_to_lease) {
    state_ = State::gathering;  // whatever the state was, reshard() releases the lease
    reshard();
  } else {
    state_ = State::ready;
  }
}

}  // namespace tessera::fsdp
