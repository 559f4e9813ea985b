// Operations on each element by itself, and those that move elements.
#include "tessera/nn/ops/arithmetic.h"

#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/cast.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/ops/dropout.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn::ops {
namespace {

void scale_into(const Tensor& x, double factor, const Tensor& out, bool accumulate) {
  with_kernels("scale", x, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    const auto wide = static_cast<kernels::OpMath<T>>(factor);
    device.scale(stream, {x.data<T>(), wide, out.data<T>(), size(x.count()), accumulate});
  });
}

Tensor transposed(const Tensor& x) {
  if (x.shape().size() < 2)
    throw InvalidUsage("transpose: x has shape " + to_string(x.shape()) + ", needs two dimensions");
  Shape shape = x.shape();
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  Tensor y = Tensor::empty(x.context(), std::move(shape), x.dtype());
  if (x.count() == 0) return y;
  const std::size_t rows = size(x.dim(-2)), columns = size(x.dim(-1));
  with_kernels("transpose", x, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.transpose(stream, {x.data<T>(), y.data<T>(), size(x.count()) / (rows * columns), rows, columns});
  });
  return y;
}

void backward_activation(Activation kind, const Tensor& x, const Gradient& dy) {
  with_kernels("activation", x, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    const T* from = dy.value().data<T>();
    const GradientTarget target = x.gradient()->acquire_reusing(dy);
    device.activation_backward(stream, kind,
                               {x.data<T>(), from, target.tensor.data<T>(), size(x.count()), target.accumulate});
  });
}

struct Gated {
  Tensor gate, up;
  std::shared_ptr<Gradient> dy;
};

void backward_swiglu(const Gated& saved) {
  with_kernels("swiglu", saved.gate, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    kernels::SwigluBackward<T> args;
    args.gate = saved.gate.data<T>();
    args.up = saved.up.data<T>();
    args.dy = saved.dy->value().data<T>();
    args.count = size(saved.gate.count());
    write_to(slot_of(saved.gate), args.dgate, args.accumulate_dgate);  // only one of the two can reuse dy's memory
    if (saved.up.requires_grad()) {
      const GradientTarget target = saved.up.gradient()->acquire_reusing(*saved.dy);
      args.dup = target.tensor.data<T>();
      args.accumulate_dup = target.accumulate;
    }
    device.swiglu_backward(stream, args);
  });
}

Tensor run_activation(Activation kind, const Tensor& x) {
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  with_kernels("activation", x, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.activation_forward(stream, {.kind = kind, .x = x.data<T>(), .y = y.data<T>(), .count = size(x.count())});
  });
  return y;
}

Tensor run_swiglu(const Tensor& gate, const Tensor& up) {
  Tensor y = Tensor::empty(gate.context(), gate.shape(), gate.dtype());
  with_kernels("swiglu", gate, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.swiglu_forward(stream, {gate.data<T>(), up.data<T>(), y.data<T>(), size(gate.count())});
  });
  return y;
}

/// Lets backwards compute y again by `run`, from inputs that y's own backward keeps.
void recompute_by(std::function<Tensor()> run, Tensor& y) {
  if (y.context().recomputed().activations) y.set_recomputation(std::make_shared<Recomputation>(std::move(run)));
}

void require_castable(DType dtype) {
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16)
    throw Unsupported("cast: no kernel for " + std::string(name_of(dtype)) + "; f32, f16 and bf16 are supported");
}

Tensor converted(const Tensor& x, DType dtype) {
  Tensor y = Tensor::empty(x.context(), x.shape(), dtype);
  x.context().device_kernels().convert(x.context().stream(), {x.raw(), x.dtype(), y.raw(), dtype, size(x.count())});
  return y;
}

struct Mask {
  RandomStream stream;
  double probability = 0;
  std::size_t samples = 0, elements = 0;
};

void apply(const Mask& mask, const Tensor& x, const Tensor& y, bool accumulate) {
  with_kernels("dropout", x, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.dropout(stream,
                   {mask.stream, mask.probability, mask.samples, mask.elements, x.data<T>(), y.data<T>(), accumulate});
  });
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) {
  require_shape("add", "b", b, a.shape());
  require_dtype("add", "b", b, a.dtype());
  Tensor y = Tensor::empty(a.context(), a.shape(), a.dtype());
  with_kernels("add", a, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.add(stream, {a.data<T>(), b.data<T>(), y.data<T>(), size(a.count())});
  });
  record_add(a, b, y);
  return y;
}

void record_add(const Tensor& a, const Tensor& b, Tensor& sum) {
  if (Tape* tape = recording({a, b}, sum))
    tape->record("add", sum, [da = slot_of(a), db = slot_of(b), dy = sum.gradient()] {
      if (da) da->accumulate(dy->value());
      if (db) db->accumulate(dy->value());
    });
}

Tensor scale(const Tensor& x, double factor) {
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  scale_into(x, factor, y, false);
  if (Tape* tape = recording({x}, y))
    tape->record("scale", y, [dx = slot_of(x), factor, dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->acquire_reusing(*dy);
      scale_into(from, factor, target.tensor, target.accumulate);
    });
  return y;
}

Tensor reshape(const Tensor& x, Shape shape) {
  Tensor y = x.viewed(std::move(shape));
  if (Tape* tape = recording({x}, y))
    tape->record("reshape", y, [dx = slot_of(x), dy = y.gradient()] { dx->accumulate(dy->value()); });
  return y;
}

Tensor transpose(const Tensor& x) {
  Tensor y = transposed(x);
  if (Tape* tape = recording({x}, y))
    tape->record("transpose", y, [dx = slot_of(x), dy = y.gradient()] { dx->accumulate(transposed(dy->value())); });
  return y;
}

Tensor activation(Activation kind, const Tensor& x) {
  Tensor y = run_activation(kind, x);
  record_activation(kind, x, y);
  return y;
}

void record_activation(Activation kind, const Tensor& x, Tensor& y) {
  Tape* tape = recording({x}, y);
  if (tape == nullptr) return;
  tape->record("activation", y, [kind, x, dy = y.gradient()] { backward_activation(kind, x, *dy); });
  recompute_by([kind, x] { return run_activation(kind, x); }, y);
}

Tensor swiglu(const Tensor& gate, const Tensor& up) {
  require_shape("swiglu", "up", up, gate.shape());
  require_dtype("swiglu", "up", up, gate.dtype());
  Tensor y = run_swiglu(gate, up);
  Tape* tape = recording({gate, up}, y);
  if (tape == nullptr) return y;
  tape->record("swiglu", y, [saved = Gated{gate, up, y.gradient()}] { backward_swiglu(saved); });
  recompute_by([gate, up] { return run_swiglu(gate, up); }, y);
  return y;
}

Tensor cast(const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  require_castable(x.dtype());
  require_castable(dtype);
  Tensor y = converted(x, dtype);
  if (Tape* tape = recording({x}, y))
    tape->record("cast", y, [dx = slot_of(x), back = x.dtype(), dy = y.gradient()] {
      dx->accumulate(converted(dy->value(), back));
    });
  return y;
}

Tensor dropout(const Tensor& x, double probability, std::string_view module) {
  if (!(probability >= 0.0 && probability < 1.0))
    throw InvalidUsage("dropout: the probability is " + std::to_string(probability) + ", needs 0 <= p < 1");
  Context& context = x.context();
  if (probability == 0.0 || !context.training()) return x;
  const std::int64_t samples = x.dim(0);
  const RngState& state = context.random();
  const Mask mask{dropout_stream(state.seed, state.step, module, static_cast<std::uint64_t>(state.first_sample)),
                  probability, size(samples), samples == 0 ? 0 : size(x.count() / samples)};
  Tensor y = Tensor::empty(context, x.shape(), x.dtype());
  apply(mask, x, y, false);
  if (Tape* tape = recording({x}, y))
    tape->record("dropout", y, [mask, dx = slot_of(x), dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->acquire_reusing(*dy);
      apply(mask, from, target.tensor, target.accumulate);
    });
  return y;
}

}  // namespace tessera::nn::ops
