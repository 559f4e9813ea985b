#include "tessera/nn/ops/norm.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

using kernels::OpMath;

struct Saved {
  Tensor x, weight, mean, rstd;
  std::shared_ptr<Gradient> dx, dweight, dbias, dy;
};

template <class T>
void backward_layer(const Saved& saved) {
  kernels::LayerNormBackward<T> args;
  args.rows = size(rows_of(saved.x));
  args.width = size(saved.x.dim(-1));
  args.x = saved.x.data<T>();
  args.weight = saved.weight.data<T>();
  args.mean = saved.mean.data<OpMath<T>>();
  args.rstd = saved.rstd.data<OpMath<T>>();
  args.dy = saved.dy->value().data<T>();
  write_to(saved.dweight, args.dweight, args.accumulate_dweight);
  write_to(saved.dbias, args.dbias, args.accumulate_dbias);
  write_to(saved.dx, args.dx, args.accumulate_dx);
  saved.x.context().kernels<T>("layer_norm").layer_norm_backward(saved.x.context().stream(), args);
}

template <class T>
void backward_rms(const Saved& saved) {
  kernels::RmsNormBackward<T> args;
  args.rows = size(rows_of(saved.x));
  args.width = size(saved.x.dim(-1));
  args.x = saved.x.data<T>();
  args.weight = saved.weight.data<T>();
  args.rstd = saved.rstd.data<OpMath<T>>();
  args.dy = saved.dy->value().data<T>();
  write_to(saved.dweight, args.dweight, args.accumulate_dweight);
  write_to(saved.dx, args.dx, args.accumulate_dx);
  saved.x.context().kernels<T>("rms_norm").rms_norm_backward(saved.x.context().stream(), args);
}

void check(std::string_view op, const Tensor& x, const Tensor& weight) {
  if (x.shape().empty()) throw InvalidUsage(std::string(op) + ": x is a scalar, needs one dimension or more");
  require_shape(op, "weight", weight, {x.dim(-1)});
  require_dtype(op, "weight", weight, x.dtype());
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check("layer_norm", x, weight);
  if (bias) require_shape("layer_norm", "bias", bias, weight.shape());
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  Tape* tape = recording({x, weight, bias}, y);
  Tensor mean, rstd;
  if (tape != nullptr) {
    mean = Tensor::empty(x.context(), {rows_of(x)}, kernels::opmath_dtype(x.dtype()));
    rstd = Tensor::empty(x.context(), {rows_of(x)}, kernels::opmath_dtype(x.dtype()));
  }
  for_floating("layer_norm", x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    kernels::LayerNormForward<T> args{size(rows_of(x)),
                                      size(x.dim(-1)),
                                      x.data<T>(),
                                      weight.data<T>(),
                                      data_or_null<T>(bias),
                                      static_cast<OpMath<T>>(eps),
                                      y.data<T>(),
                                      data_or_null<OpMath<T>>(mean),
                                      data_or_null<OpMath<T>>(rstd)};
    x.context().kernels<T>("layer_norm").layer_norm_forward(x.context().stream(), args);
  });
  if (tape != nullptr)
    tape->record("layer_norm", y,
                 [saved = Saved{x, weight, mean, rstd, slot_of(x), slot_of(weight), slot_of(bias), y.gradient()}] {
                   for_floating("layer_norm", saved.x.dtype(),
                                [&](auto zero) { backward_layer<decltype(zero)>(saved); });
                 });
  return y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check("rms_norm", x, weight);
  Tensor y = Tensor::empty(x.context(), x.shape(), x.dtype());
  Tape* tape = recording({x, weight}, y);
  Tensor rstd;
  if (tape != nullptr) rstd = Tensor::empty(x.context(), {rows_of(x)}, kernels::opmath_dtype(x.dtype()));
  for_floating("rms_norm", x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    kernels::RmsNormForward<T> args{size(rows_of(x)),
                                    size(x.dim(-1)),
                                    x.data<T>(),
                                    weight.data<T>(),
                                    static_cast<OpMath<T>>(eps),
                                    y.data<T>(),
                                    data_or_null<OpMath<T>>(rstd)};
    x.context().kernels<T>("rms_norm").rms_norm_forward(x.context().stream(), args);
  });
  if (tape != nullptr)
    tape->record("rms_norm", y,
                 [saved = Saved{x, weight, {}, rstd, slot_of(x), slot_of(weight), nullptr, y.gradient()}] {
                   for_floating("rms_norm", saved.x.dtype(), [&](auto zero) { backward_rms<decltype(zero)>(saved); });
                 });
  return y;
}

}  // namespace tessera::nn::ops
