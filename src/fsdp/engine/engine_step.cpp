// The step of an engine after the backwards, and the abort of a failed step.
#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/fsdp/engine/module_buffers.h"
#include "tessera/fsdp/engine/param_group.h"

namespace tessera::fsdp {

void Engine::step(double learning_rate) {
  if (gradients_ != Gradients::complete)
    throw InvalidUsage(
        gradients_ == Gradients::none
            ? "step: no backward of the whole model came before"
            : "step: the backwards so far were not the last; set_is_last_backward(true) before the last");
  gradients_ = Gradients::none;
  in_step_ = buffers_shared_ = false;
  finish_reductions();
  nn::OptimizerStep step{.number = ++steps_ - skipped_steps_, .learning_rate = learning_rate};
  if (measures_norm()) {
    compute_norm();
    if (options_.clip_norm > 0 || options_.use_loss_scaling)
      step.gradient_scale = static_cast<const double*>(norms_.data()) + norm_slots_ + 1;
  }
  apart_ = units_.front()->plan().periodic.has_value();
  const bool meets = apart_ && steps_ % period() == 0;
  for (const auto& unit : units_) {
    unit->update(options_.optimizer, step);
    if (!meets) unit->all_gather_updated();
  }
  if (meets) sync_replicas();
}

std::uint64_t Engine::period() const {
  const std::optional<ShardingPlan::SyncPlan>& periodic = units_.front()->plan().periodic;
  return periodic ? static_cast<std::uint64_t>(periodic->steps) : 1;
}

void Engine::sync_replicas() {
  if (!std::exchange(apart_, false)) return;
  for (const auto& unit : units_) unit->start_sync();
  for (const auto& unit : units_) {
    unit->finish_sync();
    unit->all_gather_updated();
  }
}

void Engine::set_loss_scale(double scale) {
  if (!options_.use_loss_scaling) throw InvalidUsage("set_loss_scale: set EngineOptions::use_loss_scaling");
  if (!(scale > 0) || !std::isfinite(scale))
    throw InvalidUsage("loss scale: " + std::to_string(scale) + "; a finite number above 0");
  loss_scale_ = scale;
}

void Engine::wait() {
  for (const auto& unit : units_) unit->settle();
  fabric_->join_offload();
}

void Engine::reserve_pieces() {
  std::size_t most = 0;
  for (const auto& unit : units_) most = std::max(most, unit->piece_bytes());
  fabric_->offload->reserve(most);
}

void Engine::abort_step() {
  for (const auto& unit : units_) unit->reset();
  for (UnitProgress& progress : progress_) progress = UnitProgress{};
  recomputed_.clear();
  reducing_.clear();
  clear_plugin_state();
  order_->forget();
  buffers_shared_ = false;
  gradients_ = Gradients::none;
  fabric_->recorder.drain();
}

}  // namespace tessera::fsdp
