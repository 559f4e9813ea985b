#include "tessera/nn/ops/linear.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

kernels::LinearShape check(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
  if (x.shape().empty() || weight.shape().size() != 2)
    throw InvalidUsage("linear: x has shape " + to_string(x.shape()) + " and the weight " + to_string(weight.shape()) +
                       "; needs [..., in] and a matrix");
  const bool out_in = layout == WeightLayout::out_in;
  const std::int64_t in = weight.dim(out_in ? 1 : 0);
  const std::int64_t out = weight.dim(out_in ? 0 : 1);
  if (x.dim(-1) != in)
    throw InvalidUsage("linear: x has shape " + to_string(x.shape()) + ", but " + weight.name() +
                       to_string(weight.shape()) + " takes " + std::to_string(in) + " inputs");
  require_dtype("linear", "weight", weight, x.dtype());
  if (bias) require_shape("linear", "bias", bias, {out});
  return {size(rows_of(x)), size(in), size(out), layout};
}

template <class T>
void forward(const kernels::LinearShape& shape, const Tensor& x, const Tensor& weight, const Tensor& bias,
             const Tensor& y) {
  const kernels::LinearForward<T> args{shape, x.data<T>(), weight.data<T>(), data_or_null<T>(bias), y.data<T>()};
  y.context().kernels<T>("linear").linear_forward(y.context().stream(), args);
}

struct Saved {
  kernels::LinearShape shape;
  Tensor x;       // empty where the weight wants no gradient
  Tensor weight;  // the handle: read only when the backward runs
  std::shared_ptr<Gradient> dx, dweight, dbias, dy;
};

template <class T>
void backward(const Saved& saved) {
  kernels::LinearBackward<T> args;
  args.shape = saved.shape;
  args.dy = saved.dy->value().data<T>();
  args.x = data_or_null<T>(saved.x);
  const Destination<T> dweight(saved.dweight), dbias(saved.dbias), dx(saved.dx);
  if (saved.dx) args.weight = saved.weight.data<T>();
  args.dx = dx.data;
  args.dweight = dweight.data;
  args.dbias = dbias.data;
  args.accumulate_dx = dx.accumulate;
  args.accumulate_dweight = dweight.accumulate;
  args.accumulate_dbias = dbias.accumulate;
  saved.weight.context().kernels<T>("linear").linear_backward(saved.weight.context().stream(), args);
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
  const kernels::LinearShape shape = check(x, weight, bias, layout);
  Shape out_shape = x.shape();
  out_shape.back() = static_cast<std::int64_t>(shape.out);
  Tensor y = Tensor::empty(x.context(), std::move(out_shape), x.dtype());
  for_floating("linear", x.dtype(), [&](auto zero) { forward<decltype(zero)>(shape, x, weight, bias, y); });
  if (Tape* tape = recording({x, weight, bias}, y)) {
    Saved saved{shape,       weight.requires_grad() ? x : Tensor(), weight, slot_of(x), slot_of(weight), slot_of(bias),
                y.gradient()};
    tape->record("linear", y, [saved = std::move(saved)] {
      for_floating("linear", saved.weight.dtype(), [&](auto zero) { backward<decltype(zero)>(saved); });
    });
  }
  return y;
}

}  // namespace tessera::nn::ops
