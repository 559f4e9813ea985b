#include "tessera/nn/ops/activation.h"

#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn::ops {
namespace {

template <class T>
void backward_activation(Activation kind, const Tensor& x, const Gradient& dy) {
  const T* from = dy.value().data<T>();
  const GradientTarget target = x.gradient()->acquire_reusing(dy);
  const kernels::ActivationBackward<T> args{x.data<T>(), from, target.tensor.data<T>(), size(x.count()),
                                            target.accumulate};
  x.context().kernels<T>("activation").activation_backward(x.context().stream(), kind, args);
}

struct Gated {
  Tensor gate, up;
  std::shared_ptr<Gradient> dy;
};

template <class T>
void backward_swiglu(const Gated& saved) {
  const T* from = saved.dy->value().data<T>();
  kernels::SwigluBackward<T> args;
  args.gate = saved.gate.data<T>();
  args.up = saved.up.data<T>();
  args.dy = from;
  args.count = size(saved.gate.count());
  write_to(slot_of(saved.gate), args.dgate, args.accumulate_dgate);  // only one of the two can reuse dy's memory
  if (saved.up.requires_grad()) {
    const GradientTarget target = saved.up.gradient()->acquire_reusing(*saved.dy);
    args.dup = target.tensor.data<T>();
    args.accumulate_dup = target.accumulate;
  }
  saved.gate.context().kernels<T>("swiglu").swiglu_backward(saved.gate.context().stream(), args);
}

Tensor run_activation(Activation kind, const Tensor& x) {
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  for_floating("activation", x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    x.context()
        .kernels<T>("activation")
        .activation_forward(x.context().stream(),
                            {.kind = kind, .x = x.data<T>(), .y = y.data<T>(), .count = size(x.count())});
  });
  return y;
}

Tensor run_swiglu(const Tensor& gate, const Tensor& up) {
  Tensor y = Tensor::empty(gate.context(), gate.shape(), gate.dtype());
  for_floating("swiglu", gate.dtype(), [&](auto zero) {
    using T = decltype(zero);
    gate.context().kernels<T>("swiglu").swiglu_forward(gate.context().stream(),
                                                       {gate.data<T>(), up.data<T>(), y.data<T>(), size(gate.count())});
  });
  return y;
}

/// Lets backwards compute y again by `run`, from inputs that y's own backward keeps.
void recompute_by(std::function<Tensor()> run, Tensor& y) {
  if (y.context().recomputed().activations) y.set_recomputation(std::make_shared<Recomputation>(std::move(run)));
}

}  // namespace

Tensor activation(Activation kind, const Tensor& x) {
  Tensor y = run_activation(kind, x);
  record_activation(kind, x, y);
  return y;
}

void record_activation(Activation kind, const Tensor& x, Tensor& y) {
  Tape* tape = recording({x}, y);
  if (tape == nullptr) return;
  tape->record("activation", y, [kind, x, dy = y.gradient()] {
    for_floating("activation", x.dtype(), [&](auto zero) { backward_activation<decltype(zero)>(kind, x, *dy); });
  });
  recompute_by([kind, x] { return run_activation(kind, x); }, y);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  require_shape("swiglu", "up", up, gate.shape());
  require_dtype("swiglu", "up", up, gate.dtype());
  Tensor y = run_swiglu(gate, up);
  Tape* tape = recording({gate, up}, y);
  if (tape == nullptr) return y;
  tape->record("swiglu", y, [saved = Gated{gate, up, y.gradient()}] {
    for_floating("swiglu", saved.gate.dtype(), [&](auto zero) { backward_swiglu<decltype(zero)>(saved); });
  });
  recompute_by([gate, up] { return run_swiglu(gate, up); }, y);
  return y;
}

}  // namespace tessera::nn::ops
