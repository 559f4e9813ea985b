#include "tessera/nn/ops/arithmetic.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

template <class T>
void scale_into(const Tensor& x, double factor, const Tensor& out, bool accumulate) {
  const kernels::ScaleArgs<T> args{x.data<T>(), static_cast<kernels::OpMath<T>>(factor), out.data<T>(), size(x.count()),
                                   accumulate};
  out.context().kernels<T>("scale").scale(out.context().stream(), args);
}

Tensor transposed(const Tensor& x) {
  if (x.shape().size() < 2)
    throw InvalidUsage("transpose: x has shape " + to_string(x.shape()) + ", needs two dimensions");
  Shape shape = x.shape();
  std::swap(shape[shape.size() - 1], shape[shape.size() - 2]);
  Tensor y = Tensor::empty(x.context(), std::move(shape), x.dtype());
  if (x.count() == 0) return y;
  for_floating("transpose", x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const std::int64_t rows = x.dim(-2), columns = x.dim(-1);
    const TransposeArgs<T> args{x.data<T>(), y.data<T>(), size(x.count() / (rows * columns)), size(rows),
                                size(columns)};
    x.context().kernels<T>("transpose").transpose(x.context().stream(), args);
  });
  return y;
}

}  // namespace

Tensor add(const Tensor& a, const Tensor& b) {
  require_shape("add", "b", b, a.shape());
  require_dtype("add", "b", b, a.dtype());
  Tensor y = Tensor::empty(a.context(), a.shape(), a.dtype());
  for_floating("add", a.dtype(), [&](auto zero) {
    using T = decltype(zero);
    a.context().kernels<T>("add").add(a.context().stream(), {a.data<T>(), b.data<T>(), y.data<T>(), size(a.count())});
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
  for_floating("scale", x.dtype(), [&](auto zero) { scale_into<decltype(zero)>(x, factor, y, false); });
  if (Tape* tape = recording({x}, y))
    tape->record("scale", y, [dx = slot_of(x), factor, dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->acquire_reusing(*dy);
      for_floating("scale", from.dtype(),
                   [&](auto zero) { scale_into<decltype(zero)>(from, factor, target.tensor, target.accumulate); });
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

}  // namespace tessera::nn::ops
