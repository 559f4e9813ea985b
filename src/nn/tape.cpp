#include "tessera/nn/tape.h"

#include "tessera/nn/activation_checkpoint.h"
#include "tessera/nn/module.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn {
namespace {

struct Region {
  Context& context;
  std::function<Tensor()> call;
  Module* module;
  ForwardState state;
};

Tensor call_again(const Region& region, Tape& tape) {
  const ForwardStateScope state(region.context, region.state);
  const TapeScope recording(region.context, &tape);
  if (region.module != nullptr) region.module->notify_recompute_begins();
  Tensor y = region.call();
  if (region.module != nullptr) region.module->notify_recompute_ends();
  return y;
}

void backward(const Region& region, Gradient& dy) {
  Tape tape(Phase::recompute);
  {
    const Tensor y = call_again(region, tape);
    const Tensor& from = dy.value();
    if (y.shape() != from.shape() || y.dtype() != from.dtype())
      throw InvalidUsage("checkpoint: the region returned " + to_string(from.shape()) + " " +
                         std::string(name_of(from.dtype())) + ", but in the backward " + to_string(y.shape()) + " " +
                         std::string(name_of(y.dtype())) + "; both must be equal");
    y.gradient()->accumulate(from);
  }
  dy.clear();  // drops the second owner of the memory, so that the first backward may run in place
  tape.backward_from_gradients();
}

}  // namespace

Tape::~Tape() = default;

void Tape::record(std::string_view op, const Tensor& output, std::function<void()> backward) {
  add({Kind::operation, op, output.gradient(), std::move(backward), nullptr});
}

void Tape::add(Node node) {
  if (keep_ == RecordMode::nodes) nodes_.push_back(std::move(node));
}

void Tape::enter(Module& module) { add({Kind::enter, {}, nullptr, nullptr, &module}); }
void Tape::leave(Module& module) { add({Kind::leave, {}, nullptr, nullptr, &module}); }
void Tape::clear() { nodes_.clear(); }

struct Tape::ClearOnExit {
  Tape& tape;
  ~ClearOnExit() { tape.clear(); }
};

void Tape::run(Node& node) {
  switch (node.kind) {
    case Kind::leave:
      node.module->notify_backward_begins();
      return;
    case Kind::enter:
      node.module->notify_backward_ends();
      return;
    case Kind::operation:
      break;
  }
  if (!node.output->written()) return;  // no later operation needs its gradient
  node.backward();
  node.output->clear();
}

void Tape::backward(const Tensor& loss, double seed) {
  if (loss.count() != 1)
    throw InvalidUsage("backward: the loss has shape " + to_string(loss.shape()) + ", not one element");
  const ClearOnExit emptied{*this};
  if (nodes_.empty() || !loss.requires_grad())
    throw InvalidUsage(
        "backward: nothing was recorded for this loss; compute it inside a TapeScope, from tensors that require a "
        "gradient");
  loss.gradient()->clear();
  const Tensor start = loss.gradient()->write().tensor;
  ops::with_kernels("backward", start, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.fill(stream, T(static_cast<kernels::OpMath<T>>(seed)), start.data<T>(), 1);
  });
  backward_from_gradients();
}

void Tape::backward_from_gradients() {
  const ClearOnExit emptied{*this};
  while (!nodes_.empty()) {
    Node node = std::move(nodes_.back());
    nodes_.pop_back();
    run(node);
  }
}

Tape* recording(std::initializer_list<Tensor> inputs, Tensor& output) {
  Tape* tape = output.context().tape();
  if (tape == nullptr) return nullptr;
  for (const Tensor& input : inputs) {
    if (!input || !input.requires_grad()) continue;
    output.set_requires_grad(true);
    return tape;
  }
  return nullptr;
}

const Tensor& Recomputation::result() {
  if (!result_) result_ = compute_();
  return result_;
}

SavedTensor::SavedTensor(const Tensor& x) {
  if (!x) return;
  again_ = x.recomputation();
  if (again_ == nullptr) kept_ = x;
}

Tensor run_checkpointed(Context& context, std::function<Tensor()> region, Module* module) {
  Tape* const tape = context.tape();
  if (tape == nullptr) return region();
  Tensor y;
  {
    // Marks outputs that require a gradient and lets hooks see that a backward follows, but records no nodes.
    Tape forgetful(tape->phase(), Tape::RecordMode::nothing);
    const TapeScope recording(context, &forgetful);
    y = region();
  }
  if (!y.requires_grad()) return y;
  // A separate handle: `y` may be one of the region's inputs.
  Tensor result = y.detached();
  result.set_requires_grad(true);
  tape->record("checkpoint", result,
               [kept = Region{context, std::move(region), module, context.forward_state()}, dy = result.gradient()] {
                 backward(kept, *dy);
               });
  return result;
}

int checkpoint_activations(Module& model, const std::function<bool(const Module&)>& which) {
  int picked = 0;
  for (Module* module : model.modules()) {
    const bool pick = which ? which(*module) : module->is_block();
    module->checkpoint_activations(pick);
    picked += pick ? 1 : 0;
  }
  if (picked == 0)
    throw InvalidUsage(which ? "checkpoint_activations: no module was picked"
                             : "checkpoint_activations: the model has no blocks; name the modules");
  return picked;
}

}  // namespace tessera::nn
