#include "tessera/libtorch/unit.h"

#include <torch/csrc/autograd/engine.h>
#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/libtorch/hooks/boundary.h"

namespace tessera::libtorch {
namespace {

namespace autograd = torch::autograd;

/// Passes gradients on, and calls `visit` before.
class BoundaryNode final : public autograd::Node {
 public:
  explicit BoundaryNode(std::function<void()> visit) : visit_(std::move(visit)) {}
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    visit_();
    return std::move(gradients);
  }

 private:
  const std::function<void()> visit_;
};

/// Puts the node between the tensors and what computed them. Returns false if none has a gradient.
bool insert(const std::vector<at::Tensor*>& tensors, const std::function<void()>& visit) {
  if (!at::GradMode::is_enabled()) return false;
  std::vector<at::Tensor*> differentiable;
  autograd::edge_list edges;
  for (at::Tensor* const tensor : tensors) {
    if (!tensor->defined() || !tensor->requires_grad()) continue;
    differentiable.push_back(tensor);
    edges.push_back(autograd::impl::gradient_edge(*tensor));
  }
  if (edges.empty()) return false;
  const NodePointer node = make_node<BoundaryNode>(visit);
  node->set_next_edges(std::move(edges));
  for (at::Tensor* const tensor : differentiable) put_behind(*tensor, node);
  return true;
}

}  // namespace

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

UnitHooks::~UnitHooks() = default;

/// Shared with the nodes of the backward.
struct BoundaryCall::State {
  std::shared_ptr<Boundary> boundary;
  bool has_arguments = false;  // with gradient
  bool began = false;          // its backward
};

BoundaryCall::BoundaryCall(std::shared_ptr<Boundary> boundary)
    : state_(std::make_shared<State>(State{.boundary = std::move(boundary)})) {
  if (state_->boundary->has_hooks()) state_->boundary->pre_forward();
}

BoundaryCall::~BoundaryCall() = default;

/// The backward of a call is over when the node at its arguments runs: it has the lowest sequence number of all nodes
/// of the call, and autograd runs those that are ready by descending numbers, gradients of parameters first. That of
/// the root, and of calls without such a node, is over at the end of the whole backward.
void BoundaryCall::enter(const std::vector<at::Tensor*>& arguments) {
  if (!state_->boundary->has_hooks() || state_->boundary->is_root()) return;
  state_->has_arguments = insert(arguments, [state = state_] {
    if (!state->began)
      throw base::InvalidUsage("backward: it reaches " + state->boundary->description() +
                               " through a tensor that its forward() did not return; return all that have a gradient");
    state->boundary->post_backward();
  });
}

void BoundaryCall::leave(const std::vector<at::Tensor*>& results) {
  if (!state_->boundary->has_hooks()) return;
  state_->boundary->post_forward();
  insert(results, [state = state_] {
    state->began = true;
    if (state->boundary->pre_backward(!state->has_arguments))
      autograd::Engine::get_default_engine().queue_callback([state] { state->boundary->post_backward(); });
  });
}

void BoundaryCall::fail() {
  try {
    throw;
  } catch (const c10::Error& error) {
    state_->boundary->explain(error.what());
  }
  throw;
}

}  // namespace tessera::libtorch
