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

void Boundary::pre_forward() {
  if (is_root()) {  // an exception may have ended the last pass
    passes_->in_backward = false;
    passes_->open.clear();
    passes_->entered.clear();
  }
  passes_->entered.push_back(this);
  hooks_.pre_forward(fsdp::Phase::forward);
  stream_.synchronize();
}

void Boundary::post_forward() {
  if (hooks_.post_forward) hooks_.post_forward(fsdp::Phase::forward);
}

bool Boundary::pre_backward(bool ends_with_root) {
  if (!has_hooks()) throw InvalidUsage("backward: the engine of " + description() + " is gone");
  if (is_root() && passes_->in_backward) return false;  // of another call, in the same backward
  if (!is_root() && !passes_->in_backward)
    throw InvalidUsage("backward: " + description() +
                       " was not called in a forward of the whole model; call that through its TESSERA_UNIT, or by "
                       "Engine::forward()");
  if (hooks_.pre_backward) hooks_.pre_backward();
  stream_.synchronize();
  if (is_root()) return passes_->in_backward = true;
  if (ends_with_root) passes_->open.push_back(this);
  return false;
}

void Boundary::post_backward() {
  if (!has_hooks()) return;
  if (is_root()) {
    for (Boundary* const unit : std::exchange(passes_->open, {})) unit->post_backward();
    passes_->in_backward = false;
  }
  if (hooks_.post_backward) hooks_.post_backward();
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
