#include "tessera/nn/ops/cast.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

void require_castable(DType dtype) {
  if (dtype != DType::f32 && dtype != DType::f16 && dtype != DType::bf16)
    throw Unsupported("cast: no kernel for " + std::string(name_of(dtype)) + "; f32, f16 and bf16 are supported");
}

Tensor converted(const Tensor& x, DType dtype) {
  Tensor y = Tensor::empty(x.context(), x.shape(), dtype);
  x.context().device_kernels().convert(x.context().stream(), {x.raw(), x.dtype(), y.raw(), dtype, size(x.count())});
  return y;
}

}  // namespace

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

}  // namespace tessera::nn::ops
