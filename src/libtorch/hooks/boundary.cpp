#include "tessera/libtorch/hooks/boundary.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::libtorch {

using base::InvalidUsage;

std::string Boundary::description() const {
  return is_root() ? "the model (" + type_ + ")" : "module " + path_ + " (" + type_ + ")";
}

void Boundary::set_hooks(fsdp::ModuleHooks hooks) {
  hooks_ = std::move(hooks);
  std::erase(passes_->units, this);
  if (has_hooks()) passes_->units.push_back(this);
}

void Passes::await_engine() {
  if (device.device().is_cpu())
    runtime.stream().synchronize();
  else
    runtime.device_runtime().wait_for_host_events();
}

void Boundary::pre_forward() {
  passes_->device.count_memory(passes_->runtime.memory_tracker());
  if (is_root()) {  // an exception may have ended the last pass
    passes_->device.require_current_stream();
    passes_->in_backward = false;
    passes_->open.clear();
    passes_->entered.clear();
  }
  passes_->entered.push_back(this);
  hooks_.pre_forward(phase());
  passes_->await_engine();
}

void Boundary::post_forward() {
  passes_->device.count_memory(passes_->runtime.memory_tracker());
  if (hooks_.post_forward) hooks_.post_forward(phase());
  passes_->await_engine();
}

bool Boundary::pre_backward(bool ends_with_root) {
  if (!has_hooks()) throw InvalidUsage("backward: the engine of " + description() + " is gone");
  if (is_root() && passes_->in_backward) return false;  // of another call, in the same backward
  if (!is_root() && !passes_->in_backward)
    throw InvalidUsage("backward: " + description() +
                       " was not called in a forward of the whole model; call that through its TESSERA_UNIT, or by "
                       "Engine::forward()");
  passes_->device.count_memory(passes_->runtime.memory_tracker());
  if (hooks_.pre_backward) hooks_.pre_backward();
  passes_->await_engine();
  if (is_root()) return passes_->in_backward = true;
  if (ends_with_root) passes_->open.push_back(this);
  return false;
}

void Boundary::post_backward() {
  if (!has_hooks()) return;
  passes_->device.count_memory(passes_->runtime.memory_tracker());
  if (is_root()) {
    for (Boundary* const unit : std::exchange(passes_->open, {})) unit->post_backward();
    passes_->in_backward = false;
  }
  if (hooks_.post_backward) hooks_.post_backward();
  passes_->await_engine();
}

void Boundary::explain(std::string_view error) const {
  if (!is_root() || error.find("data is not allocated") == std::string_view::npos) return;
  std::string names;
  for (const Boundary* const unit : passes_->units)
    if (std::find(passes_->entered.begin(), passes_->entered.end(), unit) == passes_->entered.end())
      names += (names.empty() ? "" : ", ") + unit->description();
  if (names.empty()) return;
  throw InvalidUsage(
      "forward: a parameter was read while its unit is resharded. Not called through a TESSERA_UNIT so far: " + names +
      "; call a unit as unit(x) or unit->forward(x), or as module->as<Unit>()->forward(x)");
}

}  // namespace tessera::libtorch
