// An engine's step: what comes after backward, and what ends one that failed.
#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/fsdp/buffers.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/order.h"
#include "tessera/fsdp/unit.h"

namespace tessera::fsdp {

void Engine::step(double learning_rate) {
  if (gradients_ != Gradients::complete)
    throw InvalidUsage(gradients_ == Gradients::none
                           ? "step: no backward of the whole model came before"
                           : "step: the backwards so far were not the last; set_last_backward(true) before the last");
  gradients_ = Gradients::none;
  in_step_ = buffers_shared_ = false;
  finish_reductions();
  nn::OptimizerStep step{.number = ++steps_ - skipped_steps_, .learning_rate = learning_rate};
  if (measures_norm()) {
    compute_norm();
    if (options_.clip_norm > 0 || options_.scales_loss)
      step.gradient_scale = static_cast<const double*>(norms_.data()) + norm_slots_ + 1;
  }
  ahead_ = units_.front()->plan().periodic.has_value();
  const bool meets = ahead_ && steps_ % period() == 0;
  for (const auto& unit : units_) {
    unit->update(options_.optimizer, step);
    if (!meets) unit->publish_update();
  }
  if (meets) meet_replicas();
}

std::uint64_t Engine::period() const {
  const std::optional<Plan::Periodic>& periodic = units_.front()->plan().periodic;
  return periodic ? static_cast<std::uint64_t>(periodic->steps) : 1;
}

void Engine::meet_replicas() {
  if (!std::exchange(ahead_, false)) return;
  for (const auto& unit : units_) unit->meet_issue();
  for (const auto& unit : units_) {
    unit->meet_finish();
    unit->publish_update();
  }
}

void Engine::set_loss_scale(double scale) {
  if (!options_.scales_loss) throw InvalidUsage("set_loss_scale: set EngineOptions::scales_loss");
  if (!(scale > 0) || !std::isfinite(scale))
    throw InvalidUsage("loss scale: " + std::to_string(scale) + "; a finite number above 0");
  loss_scale_ = scale;
}

void Engine::settle() {
  for (const auto& unit : units_) unit->settle();
  fabric_->join_offload();
}

void Engine::reserve_pieces() {
  std::size_t most = 0;
  for (const auto& unit : units_) most = std::max(most, unit->piece_bytes());
  fabric_->offload->reserve(most);
}

void Engine::reset() {
  for (const auto& unit : units_) unit->reset();
  for (Progress& progress : progress_) progress = Progress{};
  recomputed_.clear();
  reducing_.clear();
  clear_carried();
  order_->forget();
  buffers_shared_ = false;
  gradients_ = Gradients::none;
  fabric_->recorder.take();
}

}  // namespace tessera::fsdp
