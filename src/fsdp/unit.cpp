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

void Fabric::join_offload() {
  if (offload == nullptr) return;
  compute().wait(offload->up().record());
  compute().wait(offload->down().record());
}

Unit::Unit(Fabric& fabric, UnitSpec spec, int optimizer_slots) : fabric_(fabric), spec_(std::move(spec)) {
  for (FlatLayout& layout : make_layouts(spec_.parameters, fabric.mesh.size())) {
    Flat& flat = flats_.emplace_back();
    flat.precision = make_precision(layout.dtype, fabric.reduce_dtype);
    flat.layout = std::move(layout);
    allocate(flat, optimizer_slots);
  }
  if (fabric_.plan.leases_parameters) {
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
  const auto allocate_zeroed = [&](ElementRange range, DType dtype, MemoryUse use, bool offloaded) {
    const std::size_t bytes = static_cast<std::size_t>(range.count()) * size_of(dtype);
    if (offloaded) return fabric_.offload->allocate(bytes);
    Buffer buffer = fabric_.allocate(bytes, use);
    fabric_.zero(fabric_.compute(), buffer.data(), buffer.bytes());
    return buffer;
  };
  flat.values = allocate_zeroed(flat.rest, flat.layout.dtype, MemoryUse::parameter, plan.offloaded.parameters);
  if (!flat.layout.trainable) return;
  flat.gradient = allocate_zeroed(flat.kept, flat.precision.reduce, MemoryUse::gradient, plan.offloaded.gradients);
  const auto allocate_state = [&] {
    return allocate_zeroed(flat.optimized, DType::f32, MemoryUse::optimizer, plan.offloaded.optimizer);
  };
  for (int i = 0; i < slots; ++i) flat.state.push_back(allocate_state());
  if (flat.precision.masters()) flat.masters = allocate_state();
  if (plan.periodic) flat.anchor = allocate_state();
  if (plan.periodic && plan.periodic->has_momentum()) flat.outer_momentum = allocate_state();
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

bool Unit::casts() const {
  return std::any_of(flats_.begin(), flats_.end(), [](const Flat& flat) { return flat.precision.casts(); });
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
  const bool offloaded = fabric_.plan.offloaded.parameters;
  Stream& first = offloaded ? fabric_.offload->up() : stream;
  const Recorder::Span span = fabric_.recorder.begin(EventKind::unshard_issue, name(), bytes(), stream);
  if (!gathers_.empty()) gathers_.wait_on(stream);  // what the optimizer step left to gather on another axis
  first.wait(stored_);
  std::vector<Transfer> transfers;
  for (Flat& flat : flats_) {
    flat.unsharded = fabric_.parameters->acquire(flat.layout.bytes(), name(), first);
    const auto part = static_cast<std::size_t>(flat.rest.count());
    const auto whole = static_cast<std::size_t>(flat.layout.padded);
    transfers.push_back({{part_to_gather(flat), part, flat.layout.dtype, fabric_.device()},
                         {flat.unsharded.data(), whole, flat.layout.dtype, fabric_.device()},
                         &flat.layout});
  }
  if (offloaded) {
    loaded_ = first.record();
    stream.wait(loaded_);
  }
  if (fabric_.plan.gather_axis) {
    gathers_ = fabric_.all_gather->run({*fabric_.mesh.channels(*fabric_.plan.gather_axis).gather,
                                        transfers,
                                        {},
                                        {.after = &stream, .label = name()},
                                        fabric_.copier});
  }
  fabric_.recorder.end(span, stream);
  state_ = State::gathering;
}

/// At rest; or, from the host's memory, in its place in the result: the gather is in place then.
const void* Unit::part_to_gather(Flat& flat) {
  if (!fabric_.plan.offloaded.parameters) return flat.values.data();
  void* const place = Flat::at(flat.unsharded.data(), flat.layout.dtype, flat.rest.begin);
  fabric_.copier.upload(fabric_.offload->up(), place, flat.values.data(), flat.values.bytes());
  return place;
}

void Unit::wait_for_gather() {
  fabric_.compute().wait(loaded_);
  gathers_.wait_on(fabric_.compute());
}

void Unit::unshard_wait() {
  if (state_ == State::ready) return;
  unshard_issue();
  Stream& stream = fabric_.compute();
  const Recorder::Span span = fabric_.recorder.begin(EventKind::unshard_wait, name(), bytes(), stream);
  wait_for_gather();
  fabric_.recorder.end(span, stream);
  for (Flat& flat : flats_)
    if (flat.unsharded) bind_parameters(flat, flat.unsharded.data());
  state_ = State::ready;
}

void Unit::settle() {
  if (state_ == State::gathering && !fabric_.plan.leases_parameters) unshard_wait();
  if (!gathers_.empty()) gathers_.wait_on(fabric_.compute());
}

void Unit::reshard() {
  if (!fabric_.plan.leases_parameters) return;
  if (state_ == State::gathering) wait_for_gather();  // nothing used it, but its memory goes to the next
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

void Unit::reset() {
  gathers_ = Works();
  reductions_ = Works();
  stage_ = kIdle;
  has_gradients_ = held_ = accumulated_ = false;
  for (Flat& flat : flats_) {
    for (const FlatEntry& entry : flat.layout.entries) entry.parameter->gradient().unbind();
    if (flat.full_gradient) flat.full_gradient.give_back(Event());
    if (flat.written_gradient) flat.written_gradient.give_back(Event());
    if (flat.delta) flat.delta.give_back(Event());
    flat.shown = Buffer();
  }
  if (fabric_.plan.leases_parameters) {
    state_ = State::gathering;  // whatever it was: reshard() returns the lease
    reshard();
  } else {
    state_ = State::ready;
  }
}

}  // namespace tessera::fsdp
