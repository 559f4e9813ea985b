// The gradient's norm over all ranks, and the factor that clips by it.
#include <utility>

#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {

void Engine::prepare_norm() {
  Axes axes;
  for (const auto& unit : units_)
    for (const ShardingPlan::AxisSlice& cut : unit->plan().optimizer_cuts) axes.insert(cut.axis);
  norm_cuts_ = cuts_of(axes, fabric_->mesh);
  nn::MemoryPool& memory = model_.context().memory();
  norm_slots_ = 0;
  for (const auto& unit : units_) norm_slots_ += unit->norm_slots();
  norm_parts_ = memory.allocate(norm_slots_ * sizeof(double), MemoryCategory::other);
  norms_ = memory.allocate((norm_slots_ + 2) * sizeof(double), MemoryCategory::other);
  fabric_->zero(fabric_->compute(), norm_parts_.data(), norm_parts_.bytes());
  auto* slots = static_cast<double*>(norm_parts_.data());
  for (const auto& unit : units_) {
    unit->add_norm_into(slots, options_.norm, norm_cuts_);
    slots += unit->norm_slots();
  }
}

/// [Note: clipping is bitwise equal] Each flat parameter is divided into n equal slices under every strategy; each
/// slice yields one f64 partial norm, and all are added in slice order. A rank fills the slices that it holds once
/// their reduction is done; the others stay zero. Where an optimizer is sharded, one all_reduce per axis adds those
/// zeros; of units whose gradients all ranks hold, each rank fills its own slices. So every strategy adds the same
/// numbers in the same order.
void Engine::compute_norm() {
  if (std::exchange(norm_parts_stale_, false))
    for (const auto& unit : units_) unit->find_norm_parts();
  Stream& stream = fabric_->compute();
  auto* const totals = static_cast<double*>(norms_.data());
  const void* parts = norm_parts_.data();
  for (const ShardingPlan::AxisSlice& cut : norm_cuts_) {
    comm::Communicator& control = *fabric_->mesh.channels(cut.axis).control;
    control
        .all_reduce({parts, norm_slots_, DType::f64, fabric_->device()},
                    {totals, norm_slots_, DType::f64, fabric_->device()}, comm::ReduceOp::sum(),
                    {.after = &stream, .label = "grad_norm"})
        .wait_on(stream);
    parts = totals;
  }
  nn::ClipArgs clip{.norm = options_.norm,
                    .parts = static_cast<const double*>(parts),
                    .count = norm_slots_,
                    .loss_scale = loss_scale_,
                    .skips = options_.use_loss_scaling,
                    .out = totals + norm_slots_};
  if (options_.clip_norm > 0) clip.most = options_.clip_norm;
  model_.context().device_kernels().clip_factor(stream, clip);
}

double Engine::grad_norm() {
  if (!measures_norm()) throw InvalidUsage("grad_norm: set clip_norm, measure_norm or use_loss_scaling");
  double norm = 0;
  nn::download(model_.context(), static_cast<const double*>(norms_.data()) + norm_slots_, sizeof(norm),
               [&](const void* from) { norm = *static_cast<const double*>(from); });
  return norm;
}

}  // namespace tessera::fsdp
