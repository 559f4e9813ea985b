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

/// q, k and v, or their gradients; all three in the first if the others are empty.
struct Heads {
  Tensor q, k, v;
};

/// Views of q, k and v.
template <class T>
struct Views {
  Views(const Heads& heads, const AttentionShape& shape) {
    const auto data = [](const Tensor& tensor) { return tensor.data<std::remove_const_t<T>>(); };
    const auto part = [&](std::size_t index) {
      return kernels::fused_qkv_view<T>(data(heads.q), index, shape.positions, shape.heads, shape.dim);
    };
    const auto whole = [&](const Tensor& tensor, std::size_t count) {
      return kernels::heads_view<T>(data(tensor), shape.positions, count, shape.dim);
    };
    const bool fused = !heads.k;
    q = fused ? part(0) : whole(heads.q, shape.heads);
    k = fused ? part(1) : whole(heads.k, shape.kv_heads);
    v = fused ? part(2) : whole(heads.v, shape.kv_heads);
  }
  kernels::HeadsView<T> q, k, v;
};

template <class T>
void forward(KernelTable<T>& device, const Settings& settings, const Views<const T>& in, const Tensor& y,
             const Tensor& log_sum_exp) {
  const AttentionShape& shape = settings.shape;
  const Tensor memory = scratch(y.context(), device.attention_forward_scratch(shape));
  kernels::AttentionForward<T> args{shape,
                                    in.q,
                                    in.k,
                                    in.v,
                                    kernels::heads_view(y.data<T>(), shape.positions, shape.heads, shape.dim),
                                    data_or_null<kernels::OpMath<T>>(log_sum_exp),
                                    memory.raw()};
  args.dropout = settings.dropout;
  device.attention_forward(y.context().stream(), args);
}

/// A tensor for the gradient of an input. The kernel computes all: those that are not required go to temporary memory.
GradientTarget gradient_of(const Tensor& input) {
  if (!input) return {};
  if (input.requires_grad()) return input.gradient()->write();
  return {Tensor::empty(input.context(), input.shape(), input.dtype())};
}

struct Result {
  Settings settings;
  Heads in;
  Tensor y, log_sum_exp, dy;
};

template <class T>
void backward(KernelTable<T>& device, Stream& stream, const Result& result) {
  const AttentionShape& shape = result.settings.shape;
  const GradientTarget dq = gradient_of(result.in.q), dk = gradient_of(result.in.k), dv = gradient_of(result.in.v);
  const Views<const T> in(result.in, shape);
  const Views<T> out({dq.tensor, dk.tensor, dv.tensor}, shape);
  const bool fused = !result.in.k;
  const Tensor memory = scratch(result.y.context(), device.attention_backward_scratch(shape));
  const auto rows = [&](const Tensor& t) {
    return kernels::heads_view<const T>(t.data<T>(), shape.positions, shape.heads, shape.dim);
  };
  kernels::AttentionBackward<T> args{shape, in.q, in.k, in.v, rows(result.y), rows(result.dy)};
  args.log_sum_exp = result.log_sum_exp.data<kernels::OpMath<T>>();
  args.dq = out.q, args.dk = out.k, args.dv = out.v;
  args.accumulate_dq = dq.accumulate;
  args.accumulate_dk = (fused ? dq : dk).accumulate;
  args.accumulate_dv = (fused ? dq : dv).accumulate;
  args.scratch = memory.raw();
  args.dropout = result.settings.dropout;
  device.attention_backward(stream, args);
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

Tensor row_statistics(const Tensor& y, const AttentionShape& shape) {
  return Tensor::empty(y.context(), {y.dim(0), static_cast<std::int64_t>(shape.heads), y.dim(1)},
                       kernels::opmath_dtype(y.dtype()));
}

Tensor run(const Settings& settings, const Heads& in, Shape shape) {
  const DType dtype = in.q.dtype();
  Tensor y = Tensor::empty(in.q.context(), std::move(shape), dtype);
  Tape* tape = recording({in.q, in.k, in.v}, y);
  const Tensor log_sum_exp = tape != nullptr ? row_statistics(y, settings.shape) : Tensor();
  with_kernels("attention", y, [&]<class T>(KernelTable<T>& device, Stream&) {
    forward(device, settings, Views<const T>(in, settings.shape), y, log_sum_exp);
  });
  if (tape != nullptr)
    tape->record("attention", y, [settings, in, y, log_sum_exp, dy = y.gradient()] {
      const Result result{settings, in, y, log_sum_exp, dy->value()};
      with_kernels("attention", y, [&](auto& device, Stream& stream) { backward(device, stream, result); });
    });
  return y;
}

}  // namespace

Tensor attention(const Tensor& qkv, std::int64_t heads, const AttentionOptions& options) {
  const std::int64_t width = qkv.dim(-1) / 3;
  if (width * 3 != qkv.dim(-1))
    throw InvalidUsage("attention: qkv has shape " + to_string(qkv.shape()) + "; its last dimension must be 3 * width");
  const Settings settings = settings_of(qkv, {heads, heads}, width, options);
  return run(settings, {qkv, {}, {}}, {qkv.dim(0), qkv.dim(1), width});
}

Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionHeads heads,
                 const AttentionOptions& options) {
  const Settings settings = settings_of(q, heads, q.dim(-1), options);
  const Shape kv_shape{q.dim(0), q.dim(1), q.dim(-1) / heads.heads * heads.kv_heads};
  require_shape("attention", "k", k, kv_shape);
  require_shape("attention", "v", v, kv_shape);
  return run(settings, {q, k, v}, q.shape());
}

}  // namespace tessera::nn::ops
