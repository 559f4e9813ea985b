#include "tessera/nn/ops/norm.h"

#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

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

/// What a norm's forward works on: x, or x + added. Only y and `sum` are new.
struct Forward {
  Tensor x;
  Tensor added;  // may be empty
  Tensor weight, bias;
  double eps;
  Tensor sum;  // empty without `added`
  Tensor y, mean, rstd;
  const Tensor& normalized() const { return sum ? sum : x; }
};

/// Allocates the sum and records its node.
Tensor sum_of(std::string_view op, const Tensor& x, const Tensor& added) {
  require_shape(op, "added", added, x.shape());
  require_dtype(op, "added", added, x.dtype());
  Tensor sum = Tensor::empty(x.context(), x.shape(), x.dtype());
  record_add(x, added, sum);
  return sum;
}

template <class T, class Args>
void fill_forward(const Forward& f, Args& args) {
  args.rows = size(rows_of(f.x));
  args.width = size(f.x.dim(-1));
  args.x = f.x.data<T>();
  args.weight = f.weight.data<T>();
  args.eps = static_cast<OpMath<T>>(f.eps);
  args.y = f.y.data<T>();
  args.rstd = data_or_null<OpMath<T>>(f.rstd);
  args.added = data_or_null<T>(f.added);
  args.sum = data_or_null<T>(f.sum);
}

template <class T>
void forward_layer(const Forward& f) {
  kernels::LayerNormForward<T> args;
  fill_forward<T>(f, args);
  args.bias = data_or_null<T>(f.bias);
  args.mean = data_or_null<OpMath<T>>(f.mean);
  f.y.context().kernels<T>("layer_norm").layer_norm_forward(f.y.context().stream(), args);
}

template <class T>
void forward_rms(const Forward& f) {
  kernels::RmsNormForward<T> args;
  fill_forward<T>(f, args);
  f.y.context().kernels<T>("rms_norm").rms_norm_forward(f.y.context().stream(), args);
}

Tensor statistics(const Tensor& x) {
  return Tensor::empty(x.context(), {rows_of(x)}, kernels::opmath_dtype(x.dtype()));
}

/// Lets backwards compute y again from the norm's input, which its own backward keeps.
template <class Run>
void recompute_by(Run run, Forward& f) {
  if (!f.y.context().recomputed().norms) return;
  const Forward inputs{.x = f.normalized(), .weight = f.weight, .bias = f.bias, .eps = f.eps};
  f.y.set_recomputation(std::make_shared<Recomputation>([run, inputs] {
    Forward again = inputs;
    again.y = Tensor::empty(again.x.context(), again.x.shape(), again.x.dtype());
    run(again);
    return again.y;
  }));
}

void run_layer(Forward& f) {
  const Tensor& x = f.normalized();
  f.y = Tensor::empty(x.context(), x.shape(), x.dtype());
  Tape* tape = recording({x, f.weight, f.bias}, f.y);
  if (tape != nullptr) f.mean = statistics(x), f.rstd = statistics(x);
  const auto run = [](const Forward& g) {
    for_floating("layer_norm", g.x.dtype(), [&](auto zero) { forward_layer<decltype(zero)>(g); });
  };
  run(f);
  if (tape == nullptr) return;
  recompute_by(run, f);
  const Saved saved{x, f.weight, f.mean, f.rstd, slot_of(x), slot_of(f.weight), slot_of(f.bias), f.y.gradient()};
  tape->record("layer_norm", f.y, [saved] {
    for_floating("layer_norm", saved.x.dtype(), [&](auto zero) { backward_layer<decltype(zero)>(saved); });
  });
}

void run_rms(Forward& f) {
  const Tensor& x = f.normalized();
  f.y = Tensor::empty(x.context(), x.shape(), x.dtype());
  Tape* tape = recording({x, f.weight}, f.y);
  if (tape != nullptr) f.rstd = statistics(x);
  const auto run = [](const Forward& g) {
    for_floating("rms_norm", g.x.dtype(), [&](auto zero) { forward_rms<decltype(zero)>(g); });
  };
  run(f);
  if (tape == nullptr) return;
  recompute_by(run, f);
  const Saved saved{x, f.weight, {}, f.rstd, slot_of(x), slot_of(f.weight), nullptr, f.y.gradient()};
  tape->record("rms_norm", f.y, [saved] {
    for_floating("rms_norm", saved.x.dtype(), [&](auto zero) { backward_rms<decltype(zero)>(saved); });
  });
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  check("layer_norm", x, weight);
  if (bias) require_shape("layer_norm", "bias", bias, weight.shape());
  Forward f{.x = x, .weight = weight, .bias = bias, .eps = eps};
  run_layer(f);
  return f.y;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  check("rms_norm", x, weight);
  Forward f{.x = x, .weight = weight, .eps = eps};
  run_rms(f);
  return f.y;
}

SummedNorm add_layer_norm(const Tensor& x, const Tensor& added, const Tensor& weight, const Tensor& bias, double eps) {
  check("add_layer_norm", x, weight);
  if (bias) require_shape("add_layer_norm", "bias", bias, weight.shape());
  Forward f{.x = x, .added = added, .weight = weight, .bias = bias, .eps = eps};
  f.sum = sum_of("add_layer_norm", x, added);
  run_layer(f);
  return {f.sum, f.y};
}

SummedNorm add_rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps) {
  check("add_rms_norm", x, weight);
  Forward f{.x = x, .added = added, .weight = weight, .eps = eps};
  f.sum = sum_of("add_rms_norm", x, added);
  run_rms(f);
  return {f.sum, f.y};
}

}  // namespace tessera::nn::ops
