#include "tessera/libtorch/unit.h"

#include <torch/csrc/autograd/engine.h>

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
