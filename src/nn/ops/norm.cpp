#include "tessera/nn/ops/norm.h"

#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn::ops {
namespace {

using kernels::OpMath;
using kernels::RowNorm;

constexpr std::string_view name_of(RowNorm norm) { return norm == RowNorm::layer ? "layer_norm" : "rms_norm"; }

struct Saved {
  RowNorm norm;
  Tensor x, weight, mean, rstd;  // RMS norm has no mean
  std::shared_ptr<Gradient> dx, dweight, dbias, dy;
};

template <class T>
void backward(KernelTable<T>& device, Stream& stream, const Saved& saved) {
  kernels::NormBackward<T> args;
  args.rows = size(rows_of(saved.x));
  args.width = size(saved.x.dim(-1));
  args.x = saved.x.data<T>();
  args.weight = saved.weight.data<T>();
  args.mean = data_or_null<OpMath<T>>(saved.mean);
  args.rstd = saved.rstd.data<OpMath<T>>();
  args.dy = saved.dy->value().data<T>();
  args.norm = saved.norm;
  write_to(saved.dweight, args.dweight, args.accumulate_dweight);
  write_to(saved.dbias, args.dbias, args.accumulate_dbias);
  write_to(saved.dx, args.dx, args.accumulate_dx);
  device.norm_backward(stream, args);
}

void check(std::string_view op, const Tensor& x, const Tensor& weight) {
  if (x.shape().empty()) throw InvalidUsage(std::string(op) + ": x is a scalar, needs one dimension or more");
  require_shape(op, "weight", weight, {x.dim(-1)});
  require_dtype(op, "weight", weight, x.dtype());
}

/// What a norm's forward works on: x, or x + added. Only y and `sum` are new.
struct Forward {
  RowNorm norm;
  Tensor x;
  Tensor weight, bias;  // the bias may be empty
  double eps;
  Tensor added;  // may be empty
  Tensor sum;    // empty without `added`
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

void run(const Forward& f) {
  with_kernels(name_of(f.norm), f.x, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    kernels::NormForward<T> args;
    args.rows = size(rows_of(f.x));
    args.width = size(f.x.dim(-1));
    args.x = f.x.data<T>();
    args.weight = f.weight.data<T>();
    args.bias = data_or_null<T>(f.bias);
    args.eps = static_cast<OpMath<T>>(f.eps);
    args.y = f.y.data<T>();
    args.mean = data_or_null<OpMath<T>>(f.mean);
    args.rstd = data_or_null<OpMath<T>>(f.rstd);
    args.added = data_or_null<T>(f.added);
    args.sum = data_or_null<T>(f.sum);
    args.norm = f.norm;
    device.norm_forward(stream, args);
  });
}

Tensor statistics(const Tensor& x) {
  return Tensor::empty(x.context(), {rows_of(x)}, kernels::opmath_dtype(x.dtype()));
}

/// Lets backwards compute y again from the norm's input, which its own backward keeps.
void recompute(Forward& f) {
  if (!f.y.context().recomputed().norms) return;
  const Forward inputs{.norm = f.norm, .x = f.normalized(), .weight = f.weight, .bias = f.bias, .eps = f.eps};
  f.y.set_recomputation(std::make_shared<Recomputation>([inputs] {
    Forward again = inputs;
    again.y = Tensor::empty(again.x.context(), again.x.shape(), again.x.dtype());
    run(again);
    return again.y;
  }));
}

/// `added`: null for a norm of x alone.
SummedNorm normalize(std::string_view op, Forward f, const Tensor* added = nullptr) {
  check(op, f.x, f.weight);
  if (f.bias) require_shape(op, "bias", f.bias, f.weight.shape());
  if (added != nullptr) f.added = *added, f.sum = sum_of(op, f.x, *added);
  const Tensor& x = f.normalized();
  f.y = Tensor::empty(x.context(), x.shape(), x.dtype());
  Tape* tape = recording({x, f.weight, f.bias}, f.y);
  if (tape != nullptr && f.norm == RowNorm::layer) f.mean = statistics(x);
  if (tape != nullptr) f.rstd = statistics(x);
  run(f);
  if (tape == nullptr) return {f.sum, f.y};
  recompute(f);
  const Saved saved{f.norm,        x, f.weight, f.mean, f.rstd, slot_of(x), slot_of(f.weight), slot_of(f.bias),
                    f.y.gradient()};
  tape->record(name_of(f.norm), f.y, [saved] {
    with_kernels(name_of(saved.norm), saved.x, [&](auto& device, Stream& stream) { backward(device, stream, saved); });
  });
  return {f.sum, f.y};
}

}  // namespace

Tensor layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize("layer_norm", {RowNorm::layer, x, weight, bias, eps}).normalized;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  return normalize("rms_norm", {RowNorm::rms, x, weight, {}, eps}).normalized;
}

SummedNorm add_layer_norm(const Tensor& x, const Tensor& added, const Tensor& weight, const Tensor& bias, double eps) {
  return normalize("add_layer_norm", {RowNorm::layer, x, weight, bias, eps}, &added);
}

SummedNorm add_rms_norm(const Tensor& x, const Tensor& added, const Tensor& weight, double eps) {
  return normalize("add_rms_norm", {RowNorm::rms, x, weight, {}, eps}, &added);
}

}  // namespace tessera::nn::ops
