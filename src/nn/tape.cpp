#include "tessera/nn/tape.h"

#include "tessera/nn/module.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn {

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
  ops::for_floating("backward", start.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T value(static_cast<kernels::OpMath<T>>(seed));
    start.context().kernels<T>("backward").fill(start.context().stream(), value, start.data<T>(), 1);
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

}  // namespace tessera::nn
