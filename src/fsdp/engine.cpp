// The forwards and backwards of a step: implementation of the hooks in the model's modules.
#include "tessera/fsdp/engine.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp/engine/exec_order_validator.h"
#include "tessera/fsdp/engine/module_buffers.h"
#include "tessera/fsdp/engine/param_group.h"
#include "tessera/nn/kernels/gemm.h"

namespace tessera::fsdp {

/// Prefetches neighboring units, in execution direction, while this one computes. Recomputation needs no unit whose
/// backward is over.
void Engine::prefetch(std::size_t unit, int direction, nn::Phase phase) {
  const std::vector<std::size_t>& wanted = (direction > 0 ? ahead_forward_ : ahead_backward_)[unit];
  for (const std::size_t index : wanted) gather_ahead(index, phase);
  if (!wanted.empty()) return;
  for (int ahead = 1; ahead <= options_.prefetch; ++ahead) {
    const auto next = static_cast<std::ptrdiff_t>(unit) + direction * ahead;
    if (next < 0 || next >= static_cast<std::ptrdiff_t>(units_.size())) return;
    if (!gather_ahead(static_cast<std::size_t>(next), phase)) return;
  }
}

/// Returns false if a prefetch limit is reached.
bool Engine::gather_ahead(std::size_t index, nn::Phase phase) {
  ParamGroup& unit = *units_[index];
  if (unit.gathered() || (phase == nn::Phase::recompute && progress_[index].uses == 0)) return true;
  if (!may_gather_ahead(unit)) return false;
  order_->note(unit.name());
  unit.unshard();
  return true;
}

/// Before a step's first gather: sends the previous step's execution order to the other ranks.
void Engine::begin_step() {
  if (std::exchange(in_step_, true)) return;
  abort_on_mismatch([this] { order_->begin("step " + std::to_string(steps_ + 1)); });
}

/// If buffers are rank 0's: broadcasts them before the first forward of a step that a backward follows.
void Engine::share_buffers(nn::Phase phase) {
  if (options_.buffers == BufferSync::own || phase != nn::Phase::forward || model_.context().tape() == nullptr) return;
  if (!std::exchange(buffers_shared_, true)) buffers_->broadcast(0);
}

void Engine::agree(const std::string& what) {
  in_step_ = false;
  abort_on_mismatch([&] { order_->agree(what); });
}

/// On a mismatch, aborts all communicators: other ranks may be waiting for this rank on any of them, and so receive the
/// cause.
template <class Check>
void Engine::abort_on_mismatch(Check&& check) {
  try {
    check();
  } catch (const base::Mismatch& error) {
    for (const auto& [axis, channels] : fabric_->mesh.all_channels())
      for (comm::Communicator* channel : {channels.gather.get(), channels.reduce.get(), channels.control.get()})
        channel->abort(error.what());
    throw;
  }
}

bool Engine::may_gather_ahead(const ParamGroup& unit) const {
  int count = 1;
  std::size_t bytes = unit.bytes();
  for (const auto& other : units_) {
    if (!other->plan().unshards_to_lease || !other->gathered() || other->spec().is_root) continue;
    ++count;
    bytes += other->bytes();
  }
  return (options_.limit_all_gathers == 0 || count <= options_.limit_all_gathers) &&
         (options_.limit_gather_bytes == 0 || bytes <= options_.limit_gather_bytes);
}

void Engine::pre_forward(std::size_t index, nn::Phase phase) {
  ParamGroup& unit = *units_[index];
  UnitProgress& progress = progress_[index];
  const bool again = phase == nn::Phase::recompute;
  if (again) reshard_recomputed(index);
  if (!again && model_.context().tape() != nullptr) ++progress.uses;
  ++progress.entered;
  begin_step();
  share_buffers(phase);
  if (!unit.gathered()) order_->note(unit.name());
  unit.unshard();
  prefetch(index, +1, phase);
  unit.wait_for_unshard();
  progress.spans.push_back(
      fabric_->recorder.begin(TraceEventKind::forward, unit.name(), unit.bytes(), fabric_->compute()));
}

void Engine::post_forward(std::size_t index, nn::Module& module, nn::Phase phase) {
  ParamGroup& unit = *units_[index];
  UnitProgress& progress = progress_[index];
  fabric_->recorder.end(progress.spans.back(), fabric_->compute());
  progress.spans.pop_back();
  if (unit.kept_after_forward() || &module == &model_) return;
  // a unit of several modules stays unsharded until each was entered
  if (progress.entered >= unit.spec().modules.size()) {
    progress.entered = 0;
    if (phase == nn::Phase::forward) {
      unit.reshard(model_.context().tape() != nullptr);
    } else if (progress.spans.empty()) {  // otherwise this unit is still in use around this call, or in its backward
      recomputed_.push_back(index);
    }
  }
}

/// A recomputed unit stays unsharded until the next unit is recomputed, because its backward comes next.
void Engine::reshard_recomputed(std::size_t but) {
  for (const std::size_t index : std::exchange(recomputed_, {}))
    if (index != but) units_[index]->reshard(true);
}

void Engine::end_root_forward() {
  for (UnitProgress& progress : progress_) progress.entered = 0;
  if (model_.context().tape() != nullptr) return;
  for (const auto& unit : units_) unit->reshard();  // no backward follows
}

void Engine::pre_backward(std::size_t index) {
  if (gradients_ == Gradients::complete)
    throw InvalidUsage(
        "backward: this step's gradients are complete; call step() first, or set_is_last_backward(false) before all "
        "backwards of a step but the last");
  if (!std::exchange(orders_agreed_, true))  // wait once: ranks that differ mostly differ from the beginning
    abort_on_mismatch([this] {
      // GEMM libraries round differently: strategies are bitwise equal only if all ranks use the same code.
      const bool here = model_.context().runtime().host_accessible();
      order_->agree("the first backward" + (here ? " with products by " + nn::kernels::products_name() : ""));
    });
  ParamGroup& unit = *units_[index];
  std::erase(recomputed_, index);
  progress_[index].entered = 0;
  if (!unit.gathered()) order_->note(unit.name());
  unit.unshard();
  if (options_.backward_prefetch == BackwardPrefetch::pre) prefetch(index, -1, nn::Phase::backward);
  unit.wait_for_unshard();
  if (unit.reducing()) finish_reductions();  // of the previous microbatch: they had this forward to overlap with
  unit.prepare_gradients();
  progress_[index].spans.push_back(
      fabric_->recorder.begin(TraceEventKind::backward, unit.name(), unit.bytes(), fabric_->compute()));
}

void Engine::post_backward(std::size_t index) {
  UnitProgress& progress = progress_[index];
  fabric_->recorder.end(progress.spans.back(), fabric_->compute());
  progress.spans.pop_back();
  if (options_.backward_prefetch == BackwardPrefetch::post) prefetch(index, -1, nn::Phase::backward);
  if (--progress.uses > 0) return;  // used again further down the tape
  reshard_after_backward(index);
  reduce(index);
}

void Engine::reshard_after_backward(std::size_t index) {
  if (last_backward_ || options_.reshard_after_backward) units_[index]->reshard();
}

void Engine::reduce(std::size_t index) {
  // The previous reduction overlapped with a whole unit's backward. Advancing it at this point, rather than whenever it
  // happens to be done, keeps the issue order the same on every rank and at most two full gradients in memory (beside
  // the root's).
  order_->note(units_[index]->name());
  units_[index]->start_reduction(last_backward_);
  continue_reductions();
  progress_[index].reduced = true;
  if (units_[index]->reducing()) reducing_.push_back(index);
}

void Engine::continue_reductions() {
  for (const std::size_t i : reducing_) units_[i]->advance_reduction();
  std::erase_if(reducing_, [this](std::size_t i) { return !units_[i]->reducing(); });
}

void Engine::finish_reductions() {
  while (!reducing_.empty()) continue_reductions();
}

void Engine::end_root_backward() {
  for (std::size_t i = units_.size(); i-- > 0;) {
    if (progress_[i].reduced) continue;
    // This backward did not use the unit. Other ranks may have used it, so this rank contributes zeros.
    reduce(i);
  }
  // Also units that were prefetched but not used: after the step they would hold old parameters.
  for (std::size_t i = 0; i < units_.size(); ++i) reshard_after_backward(i);
  gradients_ = last_backward_ ? Gradients::complete : Gradients::of_some;
  for (UnitProgress& progress : progress_) progress = UnitProgress{};
  recomputed_.clear();
}

}  // namespace tessera::fsdp
