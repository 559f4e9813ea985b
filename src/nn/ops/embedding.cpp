#include "tessera/nn/ops/embedding.h"

#include <algorithm>
#include <vector>

#include "tessera/nn/host_access.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/ops/rope.h"

namespace tessera::nn::ops {
namespace {

template <class T>
void look_up(const Tensor& ids, const Tensor& weight, const Tensor& y, bool accumulate) {
  kernels::EmbeddingForward<T> args{weight.data<T>(),    ids.data<std::int32_t>(), y.data<T>(), size(ids.count()),
                                    size(weight.dim(0)), size(weight.dim(1)),      accumulate};
  y.context().kernels<T>("embedding").embedding_forward(y.context().stream(), args);
}

template <class T>
void backward(const Tensor& ids, const Tensor& weight, const Tensor& dy) {
  const GradientTarget dweight = weight.gradient()->write();
  kernels::EmbeddingBackward<T> args{ids.data<std::int32_t>(), dy.data<T>(),        dweight.tensor.data<T>(),
                                     size(ids.count()),        size(weight.dim(0)), size(weight.dim(1)),
                                     dweight.accumulate};
  weight.context().kernels<T>("embedding").embedding_backward(weight.context().stream(), args);
}

Tensor make_output(const Tensor& ids, const Tensor& weight) {
  require_dtype("embedding", "ids", ids, DType::i32);
  if (weight.shape().size() != 2)
    throw InvalidUsage("embedding: the table has shape " + to_string(weight.shape()) + ", needs [vocabulary, width]");
  Shape shape = ids.shape();
  shape.push_back(weight.dim(1));
  return Tensor::empty(weight.context(), std::move(shape), weight.dtype());
}

void record(const Tensor& ids, const Tensor& weight, Tensor& y) {
  if (Tape* tape = recording({weight}, y))
    tape->record("embedding", y, [ids, weight, dy = y.gradient()] {
      for_floating("embedding", weight.dtype(), [&](auto zero) { backward<decltype(zero)>(ids, weight, dy->value()); });
    });
}

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

Tensor positions_of(const Tensor& ids) {
  Tensor out = Tensor::empty(ids.context(), ids.shape(), DType::i32);
  Context& context = out.context();
  context.device_kernels().positions(context.stream(), out.data<std::int32_t>(), size(ids.count()), size(ids.dim(-1)));
  return out;
}

Tensor embedding(const Tensor& ids, const Tensor& weight) {
  Tensor y = make_output(ids, weight);
  for_floating("embedding", weight.dtype(), [&](auto zero) { look_up<decltype(zero)>(ids, weight, y, false); });
  record(ids, weight, y);
  return y;
}

Tensor embedding(const Tensor& ids, const Tensor& tokens, const Tensor& positions) {
  if (ids.shape().size() != 2 || positions.shape().size() != 2 || ids.dim(1) > positions.dim(0))
    throw InvalidUsage("embedding: ids have shape " + to_string(ids.shape()) +
                       ", needs [batch, position] with at most " + std::to_string(positions.dim(0)) + " positions");
  require_dtype("embedding", "position table", positions, tokens.dtype());
  if (positions.dim(1) != tokens.dim(-1))
    throw InvalidUsage("embedding: token and position table have widths " + std::to_string(tokens.dim(-1)) + " and " +
                       std::to_string(positions.dim(1)) + "; they must be equal");
  Tensor y = make_output(ids, tokens);
  const Tensor order = positions_of(ids);
  for_floating("embedding", tokens.dtype(), [&](auto zero) {
    look_up<decltype(zero)>(ids, tokens, y, false);
    look_up<decltype(zero)>(order, positions, y, true);
  });
  if (Tape* tape = recording({tokens, positions}, y))
    tape->record("embedding", y, [ids, order, tokens, positions, dy = y.gradient()] {
      for_floating("embedding", tokens.dtype(), [&](auto zero) {
        if (tokens.requires_grad()) backward<decltype(zero)>(ids, tokens, dy->value());
        if (positions.requires_grad()) backward<decltype(zero)>(order, positions, dy->value());
      });
    });
  return y;
}

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
