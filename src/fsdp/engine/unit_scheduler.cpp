#include "tessera/fsdp/engine/unit_scheduler.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::fsdp {

UnitScheduler::UnitScheduler(EngineCore& core)
    : core_(core),
      prefetch_forward_(resolve(core.options.prefetch_order.forward)),
      prefetch_backward_(resolve(core.options.prefetch_order.backward)),
      progress_(core.units.size()) {
  install_hooks();
}

UnitScheduler::~UnitScheduler() {
  for (Module* module : core_.model.root().modules()) module->set_hooks({});
}

std::size_t UnitScheduler::unit_named(const std::string& name) const {
  std::string known;
  for (std::size_t i = 0; i < core_.units.size(); ++i) {
    if (core_.units[i]->name() == name) return i;
    known += " " + core_.units[i]->name();
  }
  throw InvalidUsage("prefetch order: no unit '" + name + "'; use one of" + known);
}

UnitScheduler::UnitLists UnitScheduler::resolve(const std::map<std::string, std::vector<std::string>>& names) const {
  UnitLists lists(core_.units.size());
  for (const auto& [unit, ahead] : names)
    for (const std::string& name : ahead) lists[unit_named(unit)].push_back(unit_named(name));
  return lists;
}

void UnitScheduler::install_hooks() {
  bool root_is_unit = false;
  for (std::size_t i = 0; i < core_.units.size(); ++i) {
    for (Module* module : core_.units[i]->group.spec().modules) {
      const bool is_root = module == &core_.model.root();
      root_is_unit = root_is_unit || is_root;
      module->set_hooks({.pre_forward = [this, i](Phase phase) { pre_forward(i, phase); },
                         .post_forward =
                             [this, i, is_root](Phase phase) {
                               post_forward(i, is_root, phase);
                               if (is_root) end_root_forward(phase);
                             },
                         .pre_backward = [this, i] { pre_backward(i); },
                         .post_backward =
                             [this, i, is_root] {
                               post_backward(i);
                               if (is_root) end_root_backward();
                             }});
    }
  }
  if (root_is_unit) return;
  core_.model.root().set_hooks({.pre_forward = [this](Phase phase) { synchronize_buffers(phase); },
                                .post_forward = [this](Phase phase) { end_root_forward(phase); },
                                .pre_backward = {},
                                .post_backward = [this] { end_root_backward(); }});
}

// One step of units root, 0, 1, 2 with prefetch 1, as the host issues it (U unshard, R reshard, G start to reduce):
//
//   forward    U root U 0 | 0: U 1 .. R 0 | 1: U 2 .. R 1 | 2: ..       the last unit stays: its backward comes first
//   backward   2: U 1 .. R 2 G 2 | 1: U 0 .. R 1 G 1, wait G 2 | 0: .. R 0 G 0, wait G 1 | root: .. G root, wait G 0
//
// The next unit is unsharded while this one computes, and a reduction has one unit's backward to hide behind: when the
// next one has started, the compute stream waits for it, so that two full gradients exist at most (beside the root's).
// All ranks must issue the same collectives in the same order, so nothing here depends on whether a transfer is done,
// only on the order of the hooks, which the ranks compare (ExecOrderValidator).
//
// A unit may be used several times in a forward (`uses` counts those that a backward will follow), be recomputed inside
// its backward, or not be used at all; then its gradient is zero, and it is reduced when the root's backward ends.

/// Starts a unit's all-gathers, and records them in the execution order.
void UnitScheduler::unshard(std::size_t index) {
  ParamGroup& group = core_.units[index]->group;
  if (!group.unsharded()) core_.order->record(group.name());
  group.unshard();
}

/// Prefetches neighboring units, in execution direction, while this one computes. Recomputation needs no unit whose
/// backward is over.
void UnitScheduler::prefetch(std::size_t index, int direction, Phase phase) {
  const std::vector<std::size_t>& listed = (direction > 0 ? prefetch_forward_ : prefetch_backward_)[index];
  for (const std::size_t next : listed) prefetch_unit(next, phase);
  if (!listed.empty()) return;
  for (int ahead = 1; ahead <= core_.options.prefetch; ++ahead) {
    const auto next = static_cast<std::ptrdiff_t>(index) + direction * ahead;
    if (next < 0 || next >= static_cast<std::ptrdiff_t>(core_.units.size())) return;
    if (!prefetch_unit(static_cast<std::size_t>(next), phase)) return;
  }
}

/// Returns false if a prefetch limit is reached.
bool UnitScheduler::prefetch_unit(std::size_t index, Phase phase) {
  const ParamGroup& group = core_.units[index]->group;
  if (group.unsharded() || (phase == Phase::recompute && progress_[index].uses == 0)) return true;
  if (!within_limits(group)) return false;
  unshard(index);
  return true;
}

bool UnitScheduler::within_limits(const ParamGroup& group) const {
  int count = 1;
  std::size_t bytes = group.bytes();
  for (const auto& unit : core_.units) {
    const ParamGroup& other = unit->group;
    if (!other.plan().unshards_to_lease || !other.unsharded() || other.spec().is_root) continue;
    ++count;
    bytes += other.bytes();
  }
  const EngineOptions& options = core_.options;
  return (options.limit_all_gathers == 0 || count <= options.limit_all_gathers) &&
         (options.limit_gather_bytes == 0 || bytes <= options.limit_gather_bytes);
}

/// Before the first forward of a step that a backward follows.
void UnitScheduler::synchronize_buffers(Phase phase) {
  if (phase != Phase::forward || !core_.resources.runtime.recording()) return;
  if (!std::exchange(buffers_synchronized_, true)) core_.buffers->synchronize(core_.options.buffers);
}

void UnitScheduler::pre_forward(std::size_t index, Phase phase) {
  ParamGroup& group = core_.units[index]->group;
  UnitProgress& progress = progress_[index];
  const bool recomputes = phase == Phase::recompute;
  if (recomputes) reshard_recomputed(index);
  if (!recomputes && core_.resources.runtime.recording()) ++progress.uses;
  ++progress.entered;
  core_.exchange_order();
  synchronize_buffers(phase);
  unshard(index);
  prefetch(index, +1, phase);
  group.wait_for_unshard();
  EngineResources& resources = core_.resources;
  progress.spans.push_back(
      resources.trace.begin(TraceEventKind::forward, group.name(), group.bytes(), resources.compute()));
}

void UnitScheduler::post_forward(std::size_t index, bool is_model, Phase phase) {
  ParamGroup& group = core_.units[index]->group;
  UnitProgress& progress = progress_[index];
  core_.resources.trace.end(progress.spans.back(), core_.resources.compute());
  progress.spans.pop_back();
  if (group.kept_after_forward() || is_model) return;
  // a unit of several modules stays unsharded until each was entered
  if (progress.entered < group.spec().modules.size()) return;
  progress.entered = 0;
  if (phase == Phase::forward) {
    group.reshard(core_.resources.runtime.recording());
  } else if (progress.spans.empty()) {  // otherwise this unit is still in use around this call, or in its backward
    recomputed_.push_back(index);
  }
}

/// A recomputed unit stays unsharded until the next unit is recomputed, because its backward comes next.
void UnitScheduler::reshard_recomputed(std::size_t except) {
  for (const std::size_t index : std::exchange(recomputed_, {}))
    if (index != except) core_.units[index]->group.reshard(true);
}

void UnitScheduler::end_root_forward(Phase phase) {
  if (phase != Phase::forward) return;
  for (UnitProgress& progress : progress_) progress.entered = 0;
  if (core_.resources.runtime.recording()) return;
  for (const auto& unit : core_.units) unit->group.reshard();  // no backward follows
}

void UnitScheduler::pre_backward(std::size_t index) {
  if (gradients_ == Gradients::complete)
    throw InvalidUsage(
        "backward: this step's gradients are complete; call step() first, or set_is_last_backward(false) before "
        "all backwards of a step but the last");
  if (!std::exchange(orders_compared_, true)) {  // wait once: ranks that differ mostly differ from the beginning
    core_.agree_on_order("the first backward");
    core_.compare_libraries();
  }
  UnitRuntime& unit = *core_.units[index];
  std::erase(recomputed_, index);
  progress_[index].entered = 0;
  unshard(index);
  if (core_.options.backward_prefetch == BackwardPrefetch::pre) prefetch(index, -1, Phase::backward);
  unit.group.wait_for_unshard();
  // Those of the previous microbatch had this forward to overlap with.
  if (unit.reducer.reducing()) finish_reductions();
  unit.reducer.prepare_gradients();
  EngineResources& resources = core_.resources;
  progress_[index].spans.push_back(
      resources.trace.begin(TraceEventKind::backward, unit.name(), unit.group.bytes(), resources.compute()));
}

void UnitScheduler::post_backward(std::size_t index) {
  UnitProgress& progress = progress_[index];
  core_.resources.trace.end(progress.spans.back(), core_.resources.compute());
  progress.spans.pop_back();
  if (core_.options.backward_prefetch == BackwardPrefetch::post) prefetch(index, -1, Phase::backward);
  if (--progress.uses > 0) return;  // used again further down the tape
  reshard_after_backward(index);
  start_reduction(index);
}

void UnitScheduler::reshard_after_backward(std::size_t index) {
  if (last_backward_ || core_.options.reshard_after_backward) core_.units[index]->group.reshard();
}

/// The previous reduction overlapped with a whole unit's backward. Advancing it at this point, rather than whenever it
/// happens to be done, keeps the issue order the same on every rank and at most two full gradients in memory (beside
/// the root's).
void UnitScheduler::start_reduction(std::size_t index) {
  UnitRuntime& unit = *core_.units[index];
  core_.order->record(unit.name());
  unit.reducer.start_reduction(last_backward_);
  advance_reductions();
  progress_[index].reduced = true;
  if (unit.reducer.reducing()) reducing_.push_back(index);
}

void UnitScheduler::advance_reductions() {
  for (const std::size_t i : reducing_) core_.units[i]->reducer.advance_reduction();
  std::erase_if(reducing_, [this](std::size_t i) { return !core_.units[i]->reducer.reducing(); });
}

void UnitScheduler::finish_reductions() {
  while (!reducing_.empty()) advance_reductions();
}

void UnitScheduler::end_root_backward() {
  for (std::size_t i = core_.units.size(); i-- > 0;) {
    if (progress_[i].reduced) continue;
    // This backward did not use the unit. Other ranks may have used it, so this rank contributes zeros.
    start_reduction(i);
  }
  // Also units that were prefetched but not used: after the step they would hold old parameters.
  for (std::size_t i = 0; i < core_.units.size(); ++i) reshard_after_backward(i);
  gradients_ = last_backward_ ? Gradients::complete : Gradients::partial;
  for (UnitProgress& progress : progress_) progress = UnitProgress{};
  recomputed_.clear();
}

void UnitScheduler::begin_update() {
  if (gradients_ == Gradients::none) throw InvalidUsage("step: no gradients; run a backward of the whole model first");
  if (gradients_ == Gradients::partial)
    throw InvalidUsage("step: gradients are incomplete; call set_is_last_backward(true) before the last backward");
  gradients_ = Gradients::none;
  core_.order_exchange_begun = buffers_synchronized_ = false;
  finish_reductions();
}

void UnitScheduler::abort_step() {
  for (const auto& unit : core_.units) unit->reset();
  for (UnitProgress& progress : progress_) progress = UnitProgress{};
  recomputed_.clear();
  reducing_.clear();
  core_.clear_plugin_state();
  core_.order->discard_records();
  buffers_synchronized_ = false;
  gradients_ = Gradients::none;
  core_.resources.trace.drain();
}

}  // namespace tessera::fsdp
