#include "tessera/nn/ops/rope.h"

#include <algorithm>
#include <vector>

#include "tessera/nn/host_access.h"
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
  args.cosine = table.cosine.data<kernels::OpMath<T>>();
  args.sine = table.sine.data<kernels::OpMath<T>>();
  args.in = kernels::heads_view<const T>(in.data<T>(), args.positions, args.heads, args.dim);
  args.out = kernels::heads_view<T>(out.tensor.data<T>(), args.positions, args.heads, args.dim);
  args.inverse = inverse;
  args.accumulate = out.accumulate;
  in.context().kernels<T>("rope").rope(in.context().stream(), args);
}

/// The host computes the table once, with the same values for all devices.
template <class T>
void write_table(const RopeSettings& settings, const RopeTable& table) {
  std::vector<T> cosine(size(table.cosine.count())), sine(cosine.size());
  kernels::rope_table<T>(size(settings.positions), size(settings.dim), settings.theta, cosine.data(), sine.data(),
                         settings.scaling);
  const auto put = [&table](const Tensor& to, const std::vector<T>& from) {
    upload(table.cosine.context(), to.raw(), to.bytes(),
           [&](void* out) { std::copy(from.begin(), from.end(), static_cast<T*>(out)); });
  };
  put(table.cosine, cosine);
  put(table.sine, sine);
}

}  // namespace

RopeTable make_rope_table(Context& context, const RopeSettings& settings, DType dtype) {
  if (settings.dim < 2 || settings.dim % 2 != 0)
    throw InvalidUsage("rope: a head has " + std::to_string(settings.dim) + " elements, needs an even number");
  const auto make = [&] {
    return Tensor::empty(context, {settings.positions, settings.dim / 2}, dtype, MemoryCategory::other);
  };
  RopeTable table{make(), make()};
  if (dtype == DType::f64) {
    write_table<double>(settings, table);
  } else {
    require_dtype("rope", "the table", table.cosine, DType::f32);
    write_table<float>(settings, table);
  }
  return table;
}

Tensor rope(const Tensor& x, const RopeTable& table, std::int64_t heads) {
  if (x.shape().size() != 3 || x.dim(2) != heads * table.dim() || x.dim(1) > table.positions())
    throw InvalidUsage("rope: x has shape " + to_string(x.shape()) + ", needs [batch, at most " +
                       std::to_string(table.positions()) + ", " + std::to_string(heads) + " x " +
                       std::to_string(table.dim()) + "]");
  require_dtype("rope", "the table", table.cosine, kernels::opmath_dtype(x.dtype()));
  Tensor y = x.detached();
  for_floating("rope", x.dtype(), [&](auto zero) { rotate<decltype(zero)>(x, {y, false}, table, false); });
  if (Tape* tape = recording({x}, y))
    tape->record("rope", y, [table, dx = slot_of(x), dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->acquire_reusing(*dy);
      for_floating("rope", from.dtype(), [&](auto zero) { rotate<decltype(zero)>(from, target, table, true); });
    });
  return y;
}

}  // namespace tessera::nn::ops
