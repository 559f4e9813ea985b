#include "tessera/fsdp/engine/grad_norm.h"

#include <utility>

#include "tessera/comm/traffic.h"
#include "tessera/fsdp/engine/engine_core.h"

namespace tessera::fsdp {

GradNorm::GradNorm(EngineCore& core) : core_(core) {
  EngineResources& resources = core.resources;
  Axes axes;
  for (const auto& unit : core.units) {
    for (const ShardingPlan::AxisSlice& slice : unit->plan().optimizer_slices) axes.insert(slice.axis);
    slots_ += unit->reducer.norm_slots();
  }
  slices_ = slices_of(axes, resources.mesh);
  MemoryPool& memory = resources.runtime.memory();
  partials_ = memory.allocate(slots_ * (sizeof(double) + sizeof(std::uint32_t)), MemoryCategory::other);
  totals_ = memory.allocate((slots_ + 2) * sizeof(double), MemoryCategory::other);
  resources.zero(resources.compute(), partials_.data(), partials_.bytes());
  auto* const partials = static_cast<double*>(partials_.data());
  auto* const counters = reinterpret_cast<std::uint32_t*>(partials + slots_);
  std::size_t first = 0;
  for (const auto& unit : core.units) {
    unit->reducer.set_norm_slots(
        {.partials = partials + first, .counters = counters + first, .norm = core.options.norm, .slices = slices_});
    first += unit->reducer.norm_slots();
  }
}

/// [Note: clipping is bitwise equal] Each flat parameter is divided into n equal slices under every strategy; each
/// slice yields one f64 partial norm, and all are added in slice order. A rank fills the slices that it holds once
/// their reduction is done; the others stay zero. Where an optimizer is sharded, one all_reduce per axis adds those
/// zeros; of units whose gradients all ranks hold, each rank fills its own slices. So every strategy adds the same
/// numbers in the same order.
void GradNorm::compute(double loss_scale) {
  if (std::exchange(outdated_, false))
    for (const auto& unit : core_.units) unit->reducer.update_norm_partials();
  EngineResources& resources = core_.resources;
  Stream& stream = resources.compute();
  auto* const totals = static_cast<double*>(totals_.data());
  const void* partials = partials_.data();
  for (const ShardingPlan::AxisSlice& slice : slices_) {
    resources.mesh.channels(slice.axis)
        .control
        ->all_reduce({partials, slots_, DType::f64, resources.device()},
                     {totals, slots_, DType::f64, resources.device()}, comm::ReduceOp::sum(),
                     {.after = &stream, .label = "grad_norm"})
        .wait_on(stream);
    partials = totals;
  }
  ClipArgs clip{.norm = core_.options.norm,
                .parts = static_cast<const double*>(partials),
                .count = slots_,
                .loss_scale = loss_scale,
                .skips = core_.options.use_loss_scaling,
                .out = totals + slots_};
  if (core_.options.clip_norm > 0) clip.most = core_.options.clip_norm;
  resources.runtime.clip_factor(stream, clip);
}

double GradNorm::value() const {
  double norm = 0;
  core_.resources.runtime.download(static_cast<const double*>(totals_.data()) + slots_, sizeof(norm),
                                   [&](const void* from) { norm = *static_cast<const double*>(from); });
  return norm;
}

const double* GradNorm::clip_factor() const { return static_cast<const double*>(totals_.data()) + slots_ + 1; }

std::uint64_t GradNorm::formula_bytes() const {
  std::uint64_t bytes = 0;
  for (const ShardingPlan::AxisSlice& slice : slices_)
    bytes += comm::direct_bytes_sent(comm::OpKind::all_reduce, slots_, sizeof(double), slice.size, 0);
  return bytes;
}

}  // namespace tessera::fsdp
