#include "tessera/nn/ops/activation.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

template <class T>
void backward_activation(Activation kind, const Tensor& x, const Gradient& dy) {
  const T* from = dy.value().data<T>();
  const GradientTarget target = x.gradient()->write_over(dy);
  const kernels::ActivationBackward<T> args{x.data<T>(), from, target.tensor.data<T>(), size(x.count()),
                                            target.accumulate};
  launch(x.context(), args,
         [kind](ThreadPool& pool, const auto& a) { kernels::activation_backward<T>(pool, kind, a); });
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
  if (saved.gate.requires_grad()) {  // only one of the two can take over dy's memory
    const GradientTarget target = saved.gate.gradient()->write();
    args.dgate = target.tensor.data<T>();
    args.accumulate_dgate = target.accumulate;
  }
  if (saved.up.requires_grad()) {
    const GradientTarget target = saved.up.gradient()->write_over(*saved.dy);
    args.dup = target.tensor.data<T>();
    args.accumulate_dup = target.accumulate;
  }
  launch(saved.gate.context(), args, kernels::swiglu_backward<T>);
}

}  // namespace

Tensor activation(Activation kind, const Tensor& x) {
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  for_floating("activation", x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    x.context().stream().run(
        [&pool = x.context().threads(), kind, from = x.data<T>(), to = y.data<T>(), count = size(x.count())] {
          kernels::activation_forward<T>(pool, kind, from, to, count);
        });
  });
  if (Tape* tape = recording({x}, y))
    tape->record("activation", y, [kind, x, dy = y.gradient()] {
      for_floating("activation", x.dtype(), [&](auto zero) { backward_activation<decltype(zero)>(kind, x, *dy); });
    });
  return y;
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  require_shape("swiglu", "up", up, gate.shape());
  require_dtype("swiglu", "up", up, gate.dtype());
  Tensor y = Tensor::empty(gate.context(), gate.shape(), gate.dtype());
  for_floating("swiglu", gate.dtype(), [&](auto zero) {
    using T = decltype(zero);
    gate.context().stream().run([&pool = gate.context().threads(), g = gate.data<T>(), u = up.data<T>(),
                                 to = y.data<T>(),
                                 count = size(gate.count())] { kernels::swiglu_forward<T>(pool, g, u, to, count); });
  });
  if (Tape* tape = recording({gate, up}, y))
    tape->record("swiglu", y, [saved = Gated{gate, up, y.gradient()}] {
      for_floating("swiglu", saved.gate.dtype(), [&](auto zero) { backward_swiglu<decltype(zero)>(saved); });
    });
  return y;
}

}  // namespace tessera::nn::ops
