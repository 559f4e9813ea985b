// The gradient's norm over all ranks, and the factor that clips by it.
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/unit.h"
#include "tessera/nn/host_access.h"

namespace tessera::fsdp {

void Engine::prepare_norm() {
  nn::MemoryPool& memory = model_.context().memory();
  for (const auto& unit : units_) norm_slots_ += unit->square_sum_slots();
  squares_ = memory.allocate(norm_slots_ * sizeof(double), MemoryUse::other);
  norms_ = memory.allocate((norm_slots_ + 2) * sizeof(double), MemoryUse::other);
  fabric_->zero(fabric_->compute(), squares_.data(), squares_.bytes());
  auto* slots = static_cast<double*>(squares_.data());
  for (const auto& unit : units_) {
    unit->sum_squares_into(slots);
    slots += unit->square_sum_slots();
  }
}

/// [Note: clipping is part of the equality] Each flat parameter is cut into n equal slices whatever the strategy, each
/// slice gives one f64 partial sum, and all are added in slice order. A rank fills the slices that it holds, when their
/// reduction is done, and the others stay zero; where the optimizer is sharded, one all_reduce per axis adds those
/// zeros. So every strategy adds the same numbers in the same order.
void Engine::compute_norm() {
  Stream& stream = fabric_->compute();
  auto* const totals = static_cast<double*>(norms_.data());
  const void* squares = squares_.data();
  for (const Plan::Cut& cut : fabric_->plan.optimizer_cuts) {
    comm::Communicator& control = *fabric_->mesh.channels(cut.axis).control;
    control
        .all_reduce({squares, norm_slots_, DType::f64, fabric_->device()},
                    {totals, norm_slots_, DType::f64, fabric_->device()}, comm::ReduceOp::sum(),
                    {.after = &stream, .label = "grad_norm"})
        .wait_on(stream);
    squares = totals;
  }
  model_.context().device_kernels().clip_factor(stream, {.squares = static_cast<const double*>(squares),
                                                         .count = norm_slots_,
                                                         .most = options_.clip_norm,
                                                         .out = totals + norm_slots_});
}

double Engine::grad_norm() {
  if (!measures_norm()) throw InvalidUsage("grad_norm: set clip_norm or measure_norm");
  double norm = 0;
  nn::download(model_.context(), static_cast<const double*>(norms_.data()) + norm_slots_, sizeof(norm),
               [&](const void* from) { norm = *static_cast<const double*>(from); });
  return norm;
}

}  // namespace tessera::fsdp
