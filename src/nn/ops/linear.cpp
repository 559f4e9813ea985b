#include "tessera/nn/ops/linear.h"

#include "tessera/nn/nf4.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn::ops {

kernels::LinearShape linear_shape(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
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

namespace {

struct Forward {
  kernels::LinearShape shape;
  Tensor x, weight, bias;
  Tensor y;
  Tensor activated;  // may be empty
  Activation kind = Activation::relu;
};

template <class T>
void forward(KernelTable<T>& device, Stream& stream, const Forward& f) {
  const kernels::LinearForward<T> args{.shape = f.shape,
                                       .x = f.x.data<T>(),
                                       .weight = f.weight.data<T>(),
                                       .bias = data_or_null<T>(f.bias),
                                       .y = f.y.data<T>(),
                                       .activated = f.activated ? f.activated.data<T>() : nullptr,
                                       .activation = f.kind,
                                       .y_stride = f.activated ? 0 : size(f.y.dim(-1))};
  device.linear_forward(stream, args);
}

Tensor decoded(const Nf4Weight& weight, DType dtype) {
  const Tensor& encoded = weight.encoded;
  if (encoded.dtype() != DType::u8 || encoded.requires_grad() ||
      encoded.count() != static_cast<std::int64_t>(nf4_bytes(count_of(weight.shape))))
    throw InvalidUsage("linear: " + encoded.name() + to_string(encoded.shape()) + " is not a frozen NF4 encoding of " +
                       to_string(weight.shape));
  Context& context = encoded.context();
  Tensor out = Tensor::empty(context, weight.shape, dtype);
  context.device_kernels().decode_nf4(context.stream(), {encoded.raw(), out.count(), out.raw(), dtype});
  return out;
}

struct Saved {
  kernels::LinearShape shape;
  SavedTensor x;  // empty if the weight requires no gradient
  Tensor weight;  // the handle, read only when the backward runs; empty if the weight is encoded
  Nf4Weight encoded;
  std::shared_ptr<Gradient> dx, dweight, dbias, dy;
};

template <class T>
void backward(KernelTable<T>& device, Stream& stream, const Saved& saved) {
  kernels::LinearBackward<T> args;
  args.shape = saved.shape;
  args.dy = saved.dy->value().data<T>();
  args.dy_stride = size(saved.dy->value().dim(-1));
  const Tensor x = saved.x.get();
  args.x = data_or_null<T>(x);
  write_to(saved.dweight, args.dweight, args.accumulate_dweight);
  write_to(saved.dbias, args.dbias, args.accumulate_dbias);
  write_to(saved.dx, args.dx, args.accumulate_dx);
  Tensor weight = saved.weight;
  if (saved.dx && !weight) weight = decoded(saved.encoded, dtype_of<T>);
  if (saved.dx) args.weight = weight.data<T>();
  device.linear_backward(stream, args);
}

/// `row`: elements of a row of y; 0: the layer's outputs.
Forward prepare(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout, std::int64_t row = 0) {
  Forward f{.shape = linear_shape(x, weight, bias, layout), .x = x, .weight = weight, .bias = bias};
  Shape out_shape = x.shape();
  out_shape.back() = row != 0 ? row : static_cast<std::int64_t>(f.shape.out);
  f.y = Tensor::empty(x.context(), std::move(out_shape), x.dtype());
  return f;
}

void run(Forward& f, const Nf4Weight& encoded = {}) {
  with_kernels("linear", f.x, [&](auto& device, Stream& stream) { forward(device, stream, f); });
  if (Tape* tape = recording({f.x, f.weight, f.bias}, f.y)) {
    Saved saved{f.shape,
                SavedTensor(f.weight.requires_grad() ? f.x : Tensor()),
                encoded.encoded ? Tensor() : f.weight,
                encoded,
                slot_of(f.x),
                slot_of(f.weight),
                slot_of(f.bias),
                f.y.gradient()};
    tape->record("linear", f.y, [saved = std::move(saved)] {
      with_kernels("linear", saved.dy->value(), [&](auto& device, Stream& stream) { backward(device, stream, saved); });
    });
  }
}

}  // namespace

Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout) {
  Forward f = prepare(x, weight, bias, layout);
  run(f);
  return f.y;
}

Tensor padded_linear(const Tensor& x, const Tensor& weight) {
  Forward f = prepare(x, weight, {}, WeightLayout::out_in, x.context().padded_row(weight.dim(0)));
  run(f);
  return f.y;
}

Tensor linear(const Tensor& x, const Nf4Weight& weight, const Tensor& bias) {
  Forward f = prepare(x, decoded(weight, x.dtype()), bias, weight.layout);
  run(f, weight);
  return f.y;
}

Tensor activated_linear(Activation kind, const Tensor& x, const Tensor& weight, const Tensor& bias,
                        WeightLayout layout) {
  Forward f = prepare(x, weight, bias, layout);
  f.kind = kind;
  f.activated = Tensor::empty(x.context(), f.y.shape(), f.y.dtype());
  run(f);
  record_activation(kind, f.y, f.activated);
  return f.activated;
}

}  // namespace tessera::nn::ops
