#include "tessera/fsdp/unit.h"

#include <algorithm>

namespace tessera::fsdp {
namespace {

/// Runs of equal weight decay inside `range`; padding joins the run before it (it is zero and stays zero).
template <class Run>
std::vector<Run> runs_in(const FlatLayout& layout, ElementRange range) {
  std::vector<Run> runs;
  for (const FlatEntry& entry : layout.entries) {
    const std::int64_t begin = std::max(range.begin, entry.offset);
    const std::int64_t end = std::min(range.end, entry.end());
    if (begin >= end) continue;
    const bool decay = entry.parameter->decays();
    if (!runs.empty() && runs.back().decay == decay) {
      runs.back().range.end = end;
    } else {
      runs.push_back({{begin, end}, decay});
    }
  }
  return runs;
}

}  // namespace

Buffer Fabric::allocate(std::size_t bytes, std::optional<MemoryUse> use) {
  comm::Communicator& world = mesh.world();
  base::DeviceRuntime& runtime = context.runtime();
  if (runtime.host_accessible()) return world.allocate(bytes, comm::MemoryKind::host, use);
  const std::vector<comm::MemoryKind>& kinds = world.capabilities().memory;
  if (std::find(kinds.begin(), kinds.end(), comm::MemoryKind::device) != kinds.end())
    return world.allocate(bytes, comm::MemoryKind::device, use);
  Ledger& ledger = context.ledger();
  void* data = runtime.allocate(bytes);
  if (use) ledger.add(*use, bytes);
  return {data, bytes, [&runtime, &ledger, use](void* p, std::size_t n) {
            runtime.free(p, n);
            if (use) ledger.remove(*use, n);
          }};
}

Unit::Unit(Fabric& fabric, UnitSpec spec, int optimizer_slots) : fabric_(fabric), spec_(std::move(spec)) {
  for (FlatLayout& layout : make_layouts(spec_.parameters, fabric.mesh.size())) {
    Flat& flat = flats_.emplace_back();
    flat.precision = make_precision(layout.dtype, fabric.reduce_dtype);
    flat.layout = std::move(layout);
    allocate(flat, optimizer_slots);
  }
  if (fabric_.plan.gather_axis) {
    reshard();
  } else {
    for (Flat& flat : flats_) bind_parameters(flat, flat.values.data());
    state_ = State::ready;
  }
}

void Unit::allocate(Flat& flat, int slots) {
  const Plan& plan = fabric_.plan;
  const std::int64_t padded = flat.layout.padded;
  flat.rest = plan.rest(padded);
  flat.kept = plan.kept_gradient(padded);
  flat.optimized = plan.optimizer(padded);
  const auto allocate_zeroed = [&](ElementRange range, DType dtype, MemoryUse use) {
    Buffer buffer = fabric_.allocate(static_cast<std::size_t>(range.count()) * size_of(dtype), use);
    fabric_.zero(fabric_.compute(), buffer.data(), buffer.bytes());
    return buffer;
  };
  flat.values = allocate_zeroed(flat.rest, flat.layout.dtype, MemoryUse::parameter);
  if (!flat.layout.trainable) return;
  flat.gradient = allocate_zeroed(flat.kept, flat.precision.reduce, MemoryUse::gradient);
  const auto allocate_state = [&] { return allocate_zeroed(flat.optimized, DType::f32, MemoryUse::optimizer); };
  for (int i = 0; i < slots; ++i) flat.state.push_back(allocate_state());
  if (flat.precision.masters()) flat.masters = allocate_state();
  flat.runs = runs_in<Flat::Run>(flat.layout, flat.optimized);
}

std::int64_t Unit::elements() const {
  std::int64_t sum = 0;
  for (const Flat& flat : flats_) sum += flat.layout.elements;
  return sum;
}

std::int64_t Unit::padding() const {
  std::int64_t sum = 0;
  for (const Flat& flat : flats_) sum += flat.layout.padding();
  return sum;
}

std::size_t Unit::bytes() const {
  std::size_t sum = 0;
  for (const Flat& flat : flats_) sum += flat.layout.bytes();
  return sum;
}

// --- parameters

void Unit::bind_parameters(Flat& flat, void* base) {
  for (const FlatEntry& entry : flat.layout.entries) {
    nn::Tensor tensor = entry.parameter->tensor();
    tensor.bind(Flat::at(base, flat.layout.dtype, entry.offset));
  }
}

void Unit::unshard_issue() {
  if (state_ != State::sharded) return;
  Stream& stream = *fabric_.gather_stream;
  const Recorder::Span span = fabric_.recorder.begin(EventKind::unshard_issue, name(), bytes(), stream);
  if (!gathers_.empty()) gathers_.wait_on(stream);  // what the optimizer step left to gather on another axis
  std::vector<Transfer> transfers;
  for (Flat& flat : flats_) {
    flat.unsharded = fabric_.parameters->acquire(flat.layout.bytes(), name(), stream);
    const auto part = static_cast<std::size_t>(flat.rest.count());
    const auto whole = static_cast<std::size_t>(flat.layout.padded);
    transfers.push_back({{flat.values.data(), part, flat.layout.dtype, fabric_.device()},
                         {flat.unsharded.data(), whole, flat.layout.dtype, fabric_.device()}});
  }
  gathers_ = fabric_.all_gather->run({*fabric_.mesh.channels(*fabric_.plan.gather_axis).gather,
                                      transfers,
                                      {},
                                      {.after = &stream, .label = name()},
                                      fabric_.copier});
  fabric_.recorder.end(span, stream);
  state_ = State::gathering;
}

void Unit::unshard_wait() {
  if (state_ == State::ready) return;
  unshard_issue();
  Stream& stream = fabric_.compute();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::unshard_wait, name(), bytes(), stream);
  gathers_.wait_on(stream);
  fabric_.recorder.end(span, stream);
  for (Flat& flat : flats_)
    if (flat.unsharded) bind_parameters(flat, flat.unsharded.data());
  state_ = State::ready;
}

void Unit::settle() {
  if (state_ == State::gathering && !fabric_.plan.gather_axis) unshard_wait();
  if (!gathers_.empty()) gathers_.wait_on(fabric_.compute());
}

void Unit::reshard() {
  if (!fabric_.plan.gather_axis) return;
  for (Flat& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) {
      nn::Tensor tensor = entry.parameter->tensor();
      tensor.unbind("unit " + name() + " is resharded");
    }
    if (flat.unsharded) flat.unsharded.give_back(fabric_.compute().record());
  }
  if (state_ == State::ready) fabric_.recorder.mark(EventKind::reshard, name(), bytes(), fabric_.compute());
  state_ = State::sharded;
}

// --- gradients

void Unit::bind_gradients(Flat& flat, void* base) {
  for (const FlatEntry& entry : flat.layout.entries)
    entry.parameter->gradient().bind(Flat::at(base, flat.layout.dtype, entry.offset), false);
}

void Unit::begin_gradients() {
  if (has_gradients_) return;
  Stream& stream = fabric_.compute();
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    if (!flat.leases_gradient(fabric_.plan)) {
      bind_gradients(flat, flat.gradient.data());
      continue;
    }
    Lease& lease = flat.precision.casts() ? flat.written_gradient : flat.full_gradient;
    lease = fabric_.gradients->acquire(flat.layout.bytes(), name(), stream);
    const DType dtype = flat.layout.dtype;
    for (const ElementRange gap : flat.layout.gaps())
      fabric_.zero(stream, Flat::at(lease.data(), dtype, gap.begin),
                   static_cast<std::size_t>(gap.count()) * size_of(dtype));
    bind_gradients(flat, lease.data());
  }
  has_gradients_ = true;
}

/// What the backward wrote, in the type of the reduction: into the kept buffer, or a lease where a part is kept.
void Unit::cast_gradients(Flat& flat) {
  Stream& stream = fabric_.compute();
  void* to = flat.gradient.data();
  if (fabric_.plan.gradient_sharded) {
    flat.full_gradient = fabric_.gradients->acquire(flat.reduced_bytes(), name(), stream);
    to = flat.full_gradient.data();
  }
  fabric_.context.device_kernels().convert(stream,
                                           {flat.written_gradient.data(), flat.layout.dtype, to, flat.precision.reduce,
                                            static_cast<std::size_t>(flat.layout.padded)});
  flat.written_gradient.give_back(stream.record());
}

void Unit::reduce_issue() {
  begin_gradients();
  stage_input_.clear();
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    for (const FlatEntry& entry : flat.layout.entries) {
      nn::Gradient& gradient = entry.parameter->gradient();
      if (!gradient.written()) {  // an unused parameter: its gradient is zero, not what the memory held before
        const nn::GradientTarget target = gradient.write();
        fabric_.zero(fabric_.compute(), target.tensor.raw(), target.tensor.bytes());
      }
      gradient.unbind();
    }
    if (flat.written_gradient) cast_gradients(flat);
    stage_input_.push_back({0, flat.layout.padded});
  }
  has_gradients_ = false;
  stage_ = 0;
  if (fabric_.plan.reductions.empty()) {
    finish_reduction();
  } else {
    fabric_.reduce_stream->wait(fabric_.compute().record());
    start_stage();
  }
}

CollectivePlugin& Unit::plugin_for(const ReduceStage& stage) {
  return stage.scatter ? *fabric_.reduce_scatter : *fabric_.all_reduce;
}

std::vector<Transfer> Unit::stage_transfers(const ReduceStage& stage) {
  const Mesh& mesh = fabric_.mesh;
  std::vector<Transfer> transfers;
  std::size_t index = 0;
  for (Flat& flat : flats_) {
    if (!flat.layout.trainable) continue;
    ElementRange& range = stage_input_[index++];
    // Full gradients are leased until a stage has put a part of them into the kept buffer.
    const bool leased = static_cast<bool>(flat.full_gradient);
    void* from = leased ? flat.leased_gradient_of(range.begin) : flat.gradient_of(range.begin);
    const auto count = static_cast<std::size_t>(range.count());
    void* to = from;
    std::size_t out_count = count;
    if (stage.scatter) {
      const std::int64_t part = range.count() / mesh.shape().size_of(stage.axis);
      const std::int64_t begin = range.begin + part * mesh.coordinate(stage.axis);
      range = {begin, begin + part};
      out_count = static_cast<std::size_t>(part);
      to = leased && !stage.to_kept ? flat.leased_gradient_of(begin) : flat.gradient_of(begin);
    }
    const DType dtype = flat.precision.reduce;
    transfers.push_back({{from, count, dtype, fabric_.device()}, {to, out_count, dtype, fabric_.device()}});
  }
  return transfers;
}

void Unit::start_stage() {
  const ReduceStage& stage = fabric_.plan.reductions[stage_];
  Stream& stream = *fabric_.reduce_stream;
  const Recorder::Span span = fabric_.recorder.begin(EventKind::reduce_issue, name(), bytes(), stream);
  const std::vector<Transfer> transfers = stage_transfers(stage);
  reductions_ = plugin_for(stage).run({*fabric_.mesh.channels(stage.axis).reduce,
                                       transfers,
                                       stage.op,
                                       {.after = &stream, .label = name()},
                                       fabric_.copier});
  fabric_.recorder.end(span, stream);
}

void Unit::reduce_continue() {
  if (!reducing()) return;
  Stream& stream = fabric_.compute();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::reduce_wait, name(), bytes(), stream);
  reductions_.wait_on(stream);
  fabric_.recorder.end(span, stream);
  if (fabric_.plan.reductions[stage_].to_kept)
    for (Flat& flat : flats_)
      if (flat.full_gradient) flat.full_gradient.give_back(stream.record());
  if (++stage_ == fabric_.plan.reductions.size()) {
    finish_reduction();
  } else {
    fabric_.reduce_stream->wait(stream.record());
    start_stage();
  }
}

void Unit::finish_reduction() { stage_ = kIdle; }

void Unit::reset() {
  gathers_ = Works();
  reductions_ = Works();
  stage_ = kIdle;
  has_gradients_ = false;
  for (Flat& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) entry.parameter->gradient().unbind();
    if (flat.full_gradient) flat.full_gradient.give_back(Event());
    if (flat.written_gradient) flat.written_gradient.give_back(Event());
    flat.shown = Buffer();
  }
  if (fabric_.plan.gather_axis) {
    state_ = State::gathering;  // whatever it was: reshard() returns the lease
    reshard();
  } else {
    state_ = State::ready;
  }
}

}  // namespace tessera::fsdp
