#include "tessera/nn/ops/attention.h"

#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

using kernels::AttentionShape;

Tensor scratch(Context& context, std::size_t bytes) {
  return Tensor::empty(context, {static_cast<std::int64_t>(bytes)}, DType::u8);
}

/// Where q, k and v (or their gradients) lie: in one fused tensor, or in three.
template <class T>
struct Views {
  kernels::HeadsView<T> q, k, v;
};

template <class T>
Views<T> fused(T* qkv, const AttentionShape& shape) {
  const auto part = [&](std::size_t index) {
    return kernels::fused_qkv_view(qkv, index, shape.positions, shape.heads, shape.dim);
  };
  return {part(0), part(1), part(2)};
}

template <class T>
Views<T> separate(T* q, T* k, T* v, const AttentionShape& shape) {
  return {kernels::heads_view(q, shape.positions, shape.heads, shape.dim),
          kernels::heads_view(k, shape.positions, shape.kv_heads, shape.dim),
          kernels::heads_view(v, shape.positions, shape.kv_heads, shape.dim)};
}

template <class T>
void forward(const AttentionShape& shape, const Views<const T>& in, const Tensor& y, const Tensor& log_sum_exp) {
  Context& context = y.context();
  const Tensor memory =
      scratch(context, kernels::attention_forward_scratch_bytes(shape, context.threads().threads(), sizeof(T)));
  kernels::AttentionForward<T> args{shape,
                                    in.q,
                                    in.k,
                                    in.v,
                                    kernels::heads_view(y.data<T>(), shape.positions, shape.heads, shape.dim),
                                    data_or_null<T>(log_sum_exp),
                                    memory.raw()};
  launch(context, args, kernels::attention_forward<T>);
}

struct Result {
  Tensor y, log_sum_exp, dy;
};

template <class T>
void backward(const AttentionShape& shape, const Result& result, kernels::AttentionBackward<T> args) {
  Context& context = result.y.context();
  const Tensor memory =
      scratch(context, kernels::attention_backward_scratch_bytes(shape, context.threads().threads(), sizeof(T)));
  const auto rows = [&](const Tensor& t) {
    return kernels::heads_view<const T>(t.data<T>(), shape.positions, shape.heads, shape.dim);
  };
  args.shape = shape;
  args.out = rows(result.y);
  args.dout = rows(result.dy);
  args.log_sum_exp = result.log_sum_exp.data<T>();
  args.scratch = memory.raw();
  launch(context, args, kernels::attention_backward<T>);
}

AttentionShape check(const Tensor& x, std::int64_t heads, std::int64_t kv_heads, std::int64_t width) {
  if (x.shape().size() != 3)
    throw InvalidUsage("attention: queries have shape " + to_string(x.shape()) + ", needs [batch, position, width]");
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || width % heads != 0)
    throw InvalidUsage("attention: " + std::to_string(heads) + " heads over " + std::to_string(kv_heads) +
                       " key heads can't divide a width of " + std::to_string(width));
  return {size(x.dim(0)), size(x.dim(1)), size(heads), size(kv_heads), size(width / heads), 0.0};
}

template <class T>
void backward_fused(const AttentionShape& shape, const Tensor& qkv, const Result& result) {
  const Views<const T> in = fused<const T>(qkv.data<T>(), shape);
  const Destination<T> target(qkv.gradient());
  const Views<T> out = fused<T>(target.data, shape);
  kernels::AttentionBackward<T> args;
  args.q = in.q, args.k = in.k, args.v = in.v;
  args.dq = out.q, args.dk = out.k, args.dv = out.v;
  args.accumulate_dq = args.accumulate_dk = args.accumulate_dv = target.accumulate;
  backward(shape, result, args);
}

/// The kernel computes all three gradients; those that nobody wants go to memory that is dropped.
template <class T>
struct Wanted {
  explicit Wanted(const Tensor& input) {
    if (input.requires_grad()) {
      target = input.gradient()->write();
    } else {
      target.tensor = Tensor::empty(input.context(), input.shape(), input.dtype());
    }
  }
  T* data() const { return target.tensor.data<T>(); }
  GradientTarget target;
};

template <class T>
void backward_separate(const AttentionShape& shape, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Result& result) {
  const Views<const T> in = separate<const T>(q.data<T>(), k.data<T>(), v.data<T>(), shape);
  const Wanted<T> dq(q), dk(k), dv(v);
  const Views<T> out = separate<T>(dq.data(), dk.data(), dv.data(), shape);
  kernels::AttentionBackward<T> args;
  args.q = in.q, args.k = in.k, args.v = in.v;
  args.dq = out.q, args.dk = out.k, args.dv = out.v;
  args.accumulate_dq = dq.target.accumulate;
  args.accumulate_dk = dk.target.accumulate;
  args.accumulate_dv = dv.target.accumulate;
  backward(shape, result, args);
}

Tensor row_statistics(const Tensor& y, const AttentionShape& shape) {
  return Tensor::empty(y.context(), {y.dim(0), static_cast<std::int64_t>(shape.heads), y.dim(1)}, y.dtype());
}

}  // namespace

Tensor causal_attention(const Tensor& qkv, std::int64_t heads) {
  const std::int64_t width = qkv.dim(-1) / 3;
  if (width * 3 != qkv.dim(-1))
    throw InvalidUsage("attention: qkv has shape " + to_string(qkv.shape()) + "; the last must be 3 * width");
  const AttentionShape shape = check(qkv, heads, heads, width);
  Tensor y = Tensor::empty(qkv.context(), {qkv.dim(0), qkv.dim(1), width}, qkv.dtype());
  Tape* tape = recording({qkv}, y);
  const Tensor log_sum_exp = tape != nullptr ? row_statistics(y, shape) : Tensor();
  for_floating("attention", qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    forward<T>(shape, fused<const T>(qkv.data<T>(), shape), y, log_sum_exp);
  });
  if (tape != nullptr)
    tape->record("attention", y, [shape, qkv, y, log_sum_exp, dy = y.gradient()] {
      const Result result{y, log_sum_exp, dy->value()};
      for_floating("attention", qkv.dtype(), [&](auto zero) { backward_fused<decltype(zero)>(shape, qkv, result); });
    });
  return y;
}

Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionHeads heads) {
  const AttentionShape shape = check(q, heads.heads, heads.kv_heads, q.dim(-1));
  const Shape kv_shape{q.dim(0), q.dim(1), q.dim(-1) / heads.heads * heads.kv_heads};
  require_shape("attention", "k", k, kv_shape);
  require_shape("attention", "v", v, kv_shape);
  Tensor y = Tensor::empty(q.context(), q.shape(), q.dtype());
  Tape* tape = recording({q, k, v}, y);
  const Tensor log_sum_exp = tape != nullptr ? row_statistics(y, shape) : Tensor();
  for_floating("attention", q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    forward<T>(shape, separate<const T>(q.data<T>(), k.data<T>(), v.data<T>(), shape), y, log_sum_exp);
  });
  if (tape != nullptr)
    tape->record("attention", y, [shape, q, k, v, y, log_sum_exp, dy = y.gradient()] {
      const Result result{y, log_sum_exp, dy->value()};
      for_floating("attention", q.dtype(),
                   [&](auto zero) { backward_separate<decltype(zero)>(shape, q, k, v, result); });
    });
  return y;
}

}  // namespace tessera::nn::ops
