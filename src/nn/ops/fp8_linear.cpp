#include "tessera/nn/ops/fp8_linear.h"

#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/saved_tensor.h"

namespace tessera::nn::ops {
namespace {

using kernels::fp8_padded;
using kernels::Fp8Operand;

/// The quantized tensors of a layer: their place in its histories and its factors.
enum class Place : std::uint8_t { x, weight, dy };

Fp8Format format_of(Place place) { return place == Place::dy ? Fp8Format::e5m2 : Fp8Format::e4m3; }

/// The codes of a matrix. Empty tensors: not computed.
struct Quantized {
  Tensor codes;       ///< [rows, columns]
  Tensor transposed;  ///< [columns, fp8_padded(rows)]
};

/// What a layer's call quantizes with.
struct Call {
  Fp8Recipe recipe;
  Tensor descales;  ///< f32 [3, kApart], by Place

  static constexpr std::int64_t kApart = 4;  // each is aligned to 16 bytes
  float* descale(Place place) const { return descales.data<float>() + static_cast<std::int64_t>(place) * kApart; }
  Fp8Operand operand(const Tensor& codes, Place place) const {
    return {codes.data<std::uint8_t>(), format_of(place), descale(place)};
  }
};

struct Forms {
  bool as_is = false, transposed = false;
};

/// Quantizes x as [rows, columns], columns being its last extent.
Quantized quantize(const Call& call, const Tensor& x, Place place, Forms forms, bool updates) {
  Context& context = x.context();
  const std::int64_t rows = rows_of(x), columns = x.dim(-1);
  Quantized out;
  if (forms.as_is) out.codes = Tensor::empty(context, {rows, columns}, DType::u8);
  if (forms.transposed)
    out.transposed = Tensor::empty(context, {columns, static_cast<std::int64_t>(fp8_padded(size(rows)))}, DType::u8);
  const Tensor& history = call.recipe.history;
  context.device_kernels().fp8_quantize(
      context.stream(),
      {.in = x.raw(),
       .dtype = x.dtype(),
       .rows = size(rows),
       .columns = size(columns),
       .format = format_of(place),
       .scaling = call.recipe.scaling,
       .history = history ? history.data<float>() + static_cast<std::size_t>(place) * (1 + kFp8History) : nullptr,
       .updates = updates,
       .descale = call.descale(place),
       .out = data_or_null<std::uint8_t>(out.codes),
       .transposed = data_or_null<std::uint8_t>(out.transposed)});
  return out;
}

struct Saved {
  kernels::LinearShape shape;
  Call call;
  Tensor x;           // transposed codes; empty if the weight requires no gradient, or with `again`
  SavedTensor again;  // x itself, if it can be computed again: then it is quantized again, with the same scale
  Tensor weight;      // the handle, read only when the backward runs
  std::shared_ptr<Gradient> dx, dweight, dbias, dy;

  bool out_in() const { return shape.layout == WeightLayout::out_in; }
};

void product(Context& context, const kernels::Fp8ProductArgs& args) {
  context.device_kernels().fp8_product(context.stream(), args);
}

/// dx[rows, in] = dy[rows, out] * W'[in, out]^T
void write_dx(const Saved& s, const Tensor& dy) {
  Context& context = dy.context();
  const Quantized weight =
      quantize(s.call, s.weight, Place::weight, {.as_is = !s.out_in(), .transposed = s.out_in()}, false);
  const GradientTarget dx = s.dx->write();
  product(context, {.a = s.call.operand(dy, Place::dy),
                    .b = s.call.operand(s.out_in() ? weight.transposed : weight.codes, Place::weight),
                    .m = s.shape.rows,
                    .n = s.shape.in,
                    .k = s.shape.out,
                    .dtype = dx.tensor.dtype(),
                    .c = dx.tensor.raw(),
                    .accumulate = dx.accumulate});
}

/// dW[out, in] = dy'[out, rows] * x'[in, rows]^T, or dW[in, out] = x' * dy'^T
void write_dweight(const Saved& s, const Tensor& dy_transposed) {
  const GradientTarget dweight = s.dweight->write();
  const Tensor codes = s.x ? s.x : quantize(s.call, s.again.get(), Place::x, {.transposed = true}, false).transposed;
  const Fp8Operand x = s.call.operand(codes, Place::x), dy = s.call.operand(dy_transposed, Place::dy);
  product(dy_transposed.context(), {.a = s.out_in() ? dy : x,
                                    .b = s.out_in() ? x : dy,
                                    .m = s.out_in() ? s.shape.out : s.shape.in,
                                    .n = s.out_in() ? s.shape.in : s.shape.out,
                                    .k = fp8_padded(s.shape.rows),
                                    .dtype = dweight.tensor.dtype(),
                                    .c = dweight.tensor.raw(),
                                    .accumulate = dweight.accumulate});
}

void write_dbias(const Saved& s, const Tensor& dy) {
  with_kernels("linear", dy, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    kernels::LinearBackward<T> args{.shape = s.shape};
    args.dy = dy.data<T>();
    write_to(s.dbias, args.dbias, args.accumulate_dbias);
    device.linear_backward(stream, args);
  });
}

void backward(const Saved& s) {
  const Tensor& dy = s.dy->value();
  if (s.dx || s.dweight) {
    const Quantized codes = quantize(s.call, dy, Place::dy, {s.dx != nullptr, s.dweight != nullptr},
                                     s.call.recipe.scaling == Fp8Scaling::delayed);
    if (s.dweight) write_dweight(s, codes.transposed);
    if (s.dx) write_dx(s, codes.codes);
  }
  if (s.dbias) write_dbias(s, dy);
}

}  // namespace

Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
                  const Fp8Recipe& recipe) {
  const kernels::LinearShape shape = linear_shape(x, weight, bias, layout);
  Context& context = x.context();
  const Call call{recipe, Tensor::empty(context, {3, Call::kApart}, DType::f32)};
  Shape out_shape = x.shape();
  out_shape.back() = static_cast<std::int64_t>(shape.out);
  Tensor y = Tensor::empty(context, std::move(out_shape), x.dtype());
  const bool out_in = layout == WeightLayout::out_in;
  Tape* const tape = recording({x, weight, bias}, y);
  const bool keeps = tape != nullptr && weight.requires_grad(), again = keeps && x.recomputation() != nullptr;
  const Quantized left = quantize(call, x, Place::x, {.as_is = true, .transposed = keeps && !again}, recipe.updates);
  {
    const Quantized right =
        quantize(call, weight, Place::weight, {.as_is = out_in, .transposed = !out_in}, recipe.updates);
    product(context, {.a = call.operand(left.codes, Place::x),
                      .b = call.operand(out_in ? right.codes : right.transposed, Place::weight),
                      .m = shape.rows,
                      .n = shape.out,
                      .k = shape.in,
                      .dtype = y.dtype(),
                      .bias = bias ? bias.raw() : nullptr,
                      .c = y.raw(),
                      .fast = true});
  }
  if (tape != nullptr) {
    Saved saved{shape,           call,          left.transposed, SavedTensor(again ? x : Tensor()), weight, slot_of(x),
                slot_of(weight), slot_of(bias), y.gradient()};
    tape->record("linear", y, [saved = std::move(saved)] { backward(saved); });
  }
  return y;
}

}  // namespace tessera::nn::ops
