#include "tessera/fsdp/engine/flat_parameter.h"

#include "tessera/fsdp/engine/engine_resources.h"

namespace tessera::fsdp {

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
