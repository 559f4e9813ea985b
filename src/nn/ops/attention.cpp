#include "tessera/nn/ops/attention.h"

#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

using kernels::AttentionDropout;
using kernels::AttentionShape;

/// Settings that forward and backward share.
struct Settings {
  AttentionShape shape;
  AttentionDropout dropout;
};

AttentionDropout drawn(Context& context, const AttentionOptions& options) {
  if (!(options.dropout >= 0.0 && options.dropout < 1.0))
    throw InvalidUsage("attention: the dropout probability is " + std::to_string(options.dropout) +
                       ", needs 0 <= p < 1");
  if (options.dropout == 0.0 || !context.training()) return {};
  const RngState& state = context.random();
  return {options.dropout,
          dropout_stream(state.seed, state.step, options.module, static_cast<std::uint64_t>(state.first_sample))};
}

Tensor scratch(Context& context, std::size_t bytes) {
  return Tensor::empty(context, {static_cast<std::int64_t>(bytes)}, DType::u8);
}

/// Views of q, k and v (or their gradients), in one fused tensor or in three.
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
void forward(const Settings& settings, const Views<const T>& in, const Tensor& y, const Tensor& log_sum_exp) {
  const AttentionShape& shape = settings.shape;
  Context& context = y.context();
  KernelTable<T>& device = context.kernels<T>("attention");
  const Tensor memory = scratch(context, device.attention_forward_scratch(shape));
  kernels::AttentionForward<T> args{shape,
                                    in.q,
                                    in.k,
                                    in.v,
                                    kernels::heads_view(y.data<T>(), shape.positions, shape.heads, shape.dim),
                                    data_or_null<kernels::OpMath<T>>(log_sum_exp),
                                    memory.raw()};
  args.dropout = settings.dropout;
  device.attention_forward(context.stream(), args);
}

struct Result {
  Settings settings;
  Tensor y, log_sum_exp, dy;
};

template <class T>
void backward(const Result& result, kernels::AttentionBackward<T> args) {
  const AttentionShape& shape = result.settings.shape;
  Context& context = result.y.context();
  KernelTable<T>& device = context.kernels<T>("attention");
  const Tensor memory = scratch(context, device.attention_backward_scratch(shape));
  const auto rows = [&](const Tensor& t) {
    return kernels::heads_view<const T>(t.data<T>(), shape.positions, shape.heads, shape.dim);
  };
  args.shape = shape;
  args.dropout = result.settings.dropout;
  args.out = rows(result.y);
  args.dout = rows(result.dy);
  args.log_sum_exp = result.log_sum_exp.data<kernels::OpMath<T>>();
  args.scratch = memory.raw();
  device.attention_backward(context.stream(), args);
}

Settings settings_of(const Tensor& x, AttentionHeads groups, std::int64_t width, const AttentionOptions& options) {
  const auto [heads, kv_heads] = groups;
  if (x.shape().size() != 3)
    throw InvalidUsage("attention: queries have shape " + to_string(x.shape()) + ", needs [batch, position, width]");
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || width % heads != 0)
    throw InvalidUsage("attention: " + std::to_string(heads) + " heads over " + std::to_string(kv_heads) +
                       " key heads can't divide a width of " + std::to_string(width));
  return {.shape = {.batch = size(x.dim(0)),
                    .positions = size(x.dim(1)),
                    .heads = size(heads),
                    .kv_heads = size(kv_heads),
                    .dim = size(width / heads),
                    .scale = options.scale,
                    .causal = options.causal},
          .dropout = drawn(x.context(), options)};
}

template <class T>
void backward_fused(const Tensor& qkv, const Result& result) {
  const AttentionShape& shape = result.settings.shape;
  const Views<const T> in = fused<const T>(qkv.data<T>(), shape);
  const GradientTarget target = qkv.gradient()->write();
  const Views<T> out = fused<T>(target.tensor.data<T>(), shape);
  kernels::AttentionBackward<T> args;
  args.q = in.q, args.k = in.k, args.v = in.v;
  args.dq = out.q, args.dk = out.k, args.dv = out.v;
  args.accumulate_dq = args.accumulate_dk = args.accumulate_dv = target.accumulate;
  backward(result, args);
}

/// The kernel computes all three gradients; gradients that are not required go to temporary memory.
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
void backward_separate(const Tensor& q, const Tensor& k, const Tensor& v, const Result& result) {
  const AttentionShape& shape = result.settings.shape;
  const Views<const T> in = separate<const T>(q.data<T>(), k.data<T>(), v.data<T>(), shape);
  const Wanted<T> dq(q), dk(k), dv(v);
  const Views<T> out = separate<T>(dq.data(), dk.data(), dv.data(), shape);
  kernels::AttentionBackward<T> args;
  args.q = in.q, args.k = in.k, args.v = in.v;
  args.dq = out.q, args.dk = out.k, args.dv = out.v;
  args.accumulate_dq = dq.target.accumulate;
  args.accumulate_dk = dk.target.accumulate;
  args.accumulate_dv = dv.target.accumulate;
  backward(result, args);
}

Tensor row_statistics(const Tensor& y, const AttentionShape& shape) {
  return Tensor::empty(y.context(), {y.dim(0), static_cast<std::int64_t>(shape.heads), y.dim(1)},
                       kernels::opmath_dtype(y.dtype()));
}

}  // namespace

Tensor attention(const Tensor& qkv, std::int64_t heads, const AttentionOptions& options) {
  const std::int64_t width = qkv.dim(-1) / 3;
  if (width * 3 != qkv.dim(-1))
    throw InvalidUsage("attention: qkv has shape " + to_string(qkv.shape()) + "; its last dimension must be 3 * width");
  const Settings settings = settings_of(qkv, {heads, heads}, width, options);
  Tensor y = Tensor::empty(qkv.context(), {qkv.dim(0), qkv.dim(1), width}, qkv.dtype());
  Tape* tape = recording({qkv}, y);
  const Tensor log_sum_exp = tape != nullptr ? row_statistics(y, settings.shape) : Tensor();
  for_floating("attention", qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    forward<T>(settings, fused<const T>(qkv.data<T>(), settings.shape), y, log_sum_exp);
  });
  if (tape != nullptr)
    tape->record("attention", y, [settings, qkv, y, log_sum_exp, dy = y.gradient()] {
      const Result result{settings, y, log_sum_exp, dy->value()};
      for_floating("attention", qkv.dtype(), [&](auto zero) { backward_fused<decltype(zero)>(qkv, result); });
    });
  return y;
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionHeads heads,
                 const AttentionOptions& options) {
  const Settings settings = settings_of(q, heads, q.dim(-1), options);
  const Shape kv_shape{q.dim(0), q.dim(1), q.dim(-1) / heads.heads * heads.kv_heads};
  require_shape("attention", "k", k, kv_shape);
  require_shape("attention", "v", v, kv_shape);
  Tensor y = Tensor::empty(q.context(), q.shape(), q.dtype());
  Tape* tape = recording({q, k, v}, y);
  const Tensor log_sum_exp = tape != nullptr ? row_statistics(y, settings.shape) : Tensor();
  for_floating("attention", q.dtype(), [&](auto zero) {
    using T = decltype(zero);
    forward<T>(settings, separate<const T>(q.data<T>(), k.data<T>(), v.data<T>(), settings.shape), y, log_sum_exp);
  });
  if (tape != nullptr)
    tape->record("attention", y, [settings, q, k, v, y, log_sum_exp, dy = y.gradient()] {
      const Result result{settings, y, log_sum_exp, dy->value()};
      for_floating("attention", q.dtype(), [&](auto zero) { backward_separate<decltype(zero)>(q, k, v, result); });
    });
  return y;
}

}  // namespace tessera::nn::ops
