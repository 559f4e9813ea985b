#include "tessera/libtorch/activation_checkpoint.h"

#include <ATen/Context.h>
#include <torch/csrc/autograd/autograd.h>

#include <utility>

#include "tessera/base/error.h"
#include "tessera/libtorch/hooks/boundary.h"
#include "tessera/libtorch/unit.h"

namespace tessera::libtorch {
namespace {

namespace autograd = torch::autograd;
using base::InvalidUsage;
using Region = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

/// Gives a generator another state for a scope.
class RandomScope {
 public:
  RandomScope(at::Generator& generator, const at::Tensor& state) : generator_(generator), before_(state_of(generator)) {
    set(state);
  }
  ~RandomScope() { set(before_); }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  void set(const at::Tensor& state) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state);
  }
  at::Generator& generator_;
  const at::Tensor before_;
};

at::Device device_of(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors)
    if (tensor.defined()) return tensor.device();
  return at::kCPU;
}

std::uint32_t version_of(const at::Tensor& tensor) { return tensor.defined() ? tensor._version() : 0; }

bool may_have_gradient(const at::Tensor& tensor) {
  return tensor.defined() && autograd::isDifferentiableType(tensor.scalar_type());
}

/// Sets a flag for a scope.
class Flag {
 public:
  Flag(Boundary* boundary, bool Passes::*flag)
      : flag_(boundary != nullptr ? &(boundary->passes().*flag) : &unused_), before_(std::exchange(*flag_, true)) {}
  ~Flag() { *flag_ = before_; }
  Flag(const Flag&) = delete;
  Flag& operator=(const Flag&) = delete;

 private:
  bool unused_ = false;
  bool* const flag_;
  const bool before_;
};

class CheckpointNode final : public autograd::Node {
 public:
  CheckpointNode(std::shared_ptr<Boundary> boundary, std::vector<at::Tensor> inputs, Region region)
      : boundary_(std::move(boundary)),
        inputs_(std::move(inputs)),
        region_(std::move(region)),
        generator_(at::globalContext().defaultGenerator(device_of(inputs_))),
        random_(state_of(generator_)) {
    for (const at::Tensor& input : inputs_) versions_.push_back(version_of(input));
  }
  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (!region_) throw InvalidUsage("backward: a checkpointed call computes its gradients once; call it again");
    if (at::GradMode::is_enabled())
      throw base::Unsupported(
          "backward: create_graph, for a backward through this one, is not supported through a checkpointed call");
    if (boundary_ != nullptr) boundary_->pre_backward(/*ends_with_root=*/false);
    std::vector<at::Tensor> inputs;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (version_of(inputs_[i]) != versions_[i])
        throw InvalidUsage("backward: an input of a checkpointed call was changed in place after the call");
      inputs.push_back(inputs_[i].defined() ? inputs_[i].detach() : at::Tensor());
      if (inputs_[i].requires_grad()) inputs.back().set_requires_grad(true);
    }
    run_backward(compute_again(inputs), gradients);
    autograd::variable_list results;
    for (const at::Tensor& input : inputs)
      if (input.requires_grad()) results.push_back(input.grad());
    if (boundary_ != nullptr) boundary_->post_backward();
    return results;
  }
  void release_variables() override {
    inputs_.clear();
    region_ = {};
  }

 private:
  std::vector<at::Tensor> compute_again(const std::vector<at::Tensor>& inputs) {
    const at::AutoGradMode records(true);
    const Flag recomputes(boundary_.get(), &Passes::recomputes);
    const RandomScope random(generator_, random_);
    return region_(inputs);
  }
  static void run_backward(const std::vector<at::Tensor>& results, const autograd::variable_list& gradients) {
    autograd::variable_list from, by;
    std::size_t next = 0;
    for (const at::Tensor& result : results) {
      if (!may_have_gradient(result)) continue;
      const at::Tensor& gradient = gradients.at(next++);
      if (!result.requires_grad() || !gradient.defined()) continue;
      from.push_back(result);
      by.push_back(gradient);
    }
    if (!from.empty()) autograd::backward(from, by);
  }

  const std::shared_ptr<Boundary> boundary_;
  std::vector<at::Tensor> inputs_;
  std::vector<std::uint32_t> versions_;
  Region region_;
  at::Generator generator_;
  const at::Tensor random_;  ///< the generator's state at the call
};

}  // namespace

std::vector<at::Tensor> run_checkpointed(const std::shared_ptr<Boundary>& boundary,
                                         const std::vector<at::Tensor>& inputs, Region region) {
  const std::shared_ptr<Boundary> hooked = boundary != nullptr && boundary->has_hooks() ? boundary : nullptr;
  if (hooked != nullptr) hooked->pre_forward();
  const NodePointer node = make_node<CheckpointNode>(hooked, inputs, region);
  std::vector<at::Tensor> results;
  {
    const at::NoGradGuard no_grad;
    const Flag checkpoints(hooked.get(), &Passes::checkpoints);
    results = region(inputs);
  }
  if (hooked != nullptr) hooked->post_forward();
  autograd::edge_list edges;
  for (const at::Tensor& input : inputs)
    if (input.requires_grad()) edges.push_back(autograd::impl::gradient_edge(input));
  node->set_next_edges(std::move(edges));
  for (at::Tensor& result : results)
    if (may_have_gradient(result)) put_behind(result, node);
  return results;
}

int checkpoint_activations(torch::nn::Module& model, const std::function<bool(const torch::nn::Module&)>& which) {
  int selected = 0;
  const std::function<void(torch::nn::Module&, bool)> visit = [&](torch::nn::Module& module, bool within) {
    for (const auto& child : module.children()) {
      auto* const unit = dynamic_cast<UnitHooks*>(child.get());
      const bool wanted = which ? which(*child) : unit != nullptr && !within;
      if (wanted && unit == nullptr)
        throw InvalidUsage("checkpoint_activations: " + child->name() +
                           " is no TESSERA_UNIT; select modules that are made through its holder");
      if (unit != nullptr) unit->set_checkpointed(wanted);
      selected += wanted ? 1 : 0;
      visit(*child, within || wanted);
    }
  };
  visit(model, false);
  if (selected == 0)
    throw InvalidUsage(which ? "checkpoint_activations: no module was selected"
                             : "checkpoint_activations: the model has no TESSERA_UNIT below it");
  return selected;
}

}  // namespace tessera::libtorch
