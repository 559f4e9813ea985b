#include "tessera/nn/ops/rope.h"

#include "tessera/nn/kernels/rope.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

template <class T>
void rotate(const Tensor& in, const GradientTarget& out, const RopeTable& table, bool inverse) {
  kernels::RopeArgs<T> args;
  args.batch = size(in.dim(0));
  args.positions = size(in.dim(1));
  args.dim = size(table.dim());
  args.heads = size(in.dim(2)) / args.dim;
  args.cosine = table.cosine.data<T>();
  args.sine = table.sine.data<T>();
  args.in = kernels::heads_view<const T>(in.data<T>(), args.positions, args.heads, args.dim);
  args.out = kernels::heads_view<T>(out.tensor.data<T>(), args.positions, args.heads, args.dim);
  args.inverse = inverse;
  args.accumulate = out.accumulate;
  launch(in.context(), args, kernels::rope<T>);
}

}  // namespace

RopeTable make_rope_table(Context& context, const RopeSettings& settings, DType dtype) {
  if (settings.dim < 2 || settings.dim % 2 != 0)
    throw InvalidUsage("rope: a head has " + std::to_string(settings.dim) + " elements, needs an even number");
  const auto make = [&] {
    return Tensor::empty(context, {settings.positions, settings.dim / 2}, dtype, MemoryUse::other);
  };
  RopeTable table{make(), make()};
  for_floating("rope", dtype, [&](auto zero) {
    using T = decltype(zero);
    context.stream().run([settings, cosine = table.cosine.data<T>(), sine = table.sine.data<T>()] {
      kernels::rope_table<T>(size(settings.positions), size(settings.dim), settings.theta, cosine, sine);
    });
  });
  return table;
}

Tensor rope(const Tensor& x, const RopeTable& table, std::int64_t heads) {
  if (x.shape().size() != 3 || x.dim(2) != heads * table.dim() || x.dim(1) > table.positions())
    throw InvalidUsage("rope: x has shape " + to_string(x.shape()) + ", needs [batch, at most " +
                       std::to_string(table.positions()) + ", " + std::to_string(heads) + " x " +
                       std::to_string(table.dim()) + "]");
  require_dtype("rope", "x", x, table.cosine.dtype());
  Tensor y = x.detached();
  for_floating("rope", x.dtype(), [&](auto zero) { rotate<decltype(zero)>(x, {y, false}, table, false); });
  if (Tape* tape = recording({x}, y))
    tape->record("rope", y, [table, dx = slot_of(x), dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->write_over(*dy);
      for_floating("rope", from.dtype(), [&](auto zero) { rotate<decltype(zero)>(from, target, table, true); });
    });
  return y;
}

}  // namespace tessera::nn::ops
