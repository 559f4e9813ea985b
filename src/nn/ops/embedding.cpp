#include "tessera/nn/ops/embedding.h"

#include <algorithm>
#include <vector>

#include "tessera/nn/host_access.h"
#include "tessera/nn/ops/dispatch.h"
#include "tessera/nn/ops/rope.h"

namespace tessera::nn::ops {
namespace {

void look_up(const Tensor& ids, const Tensor& weight, const Tensor& y, bool accumulate) {
  const std::size_t rows = size(weight.dim(0)), width = size(weight.dim(1));
  with_kernels("embedding", weight, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    device.embedding_forward(
        stream, {weight.data<T>(), ids.data<std::int32_t>(), y.data<T>(), size(ids.count()), rows, width, accumulate});
  });
}

void backward(const Tensor& ids, const Tensor& weight, const Tensor& dy) {
  const std::size_t rows = size(weight.dim(0)), width = size(weight.dim(1));
  with_kernels("embedding", weight, [&]<class T>(KernelTable<T>& device, Stream& stream) {
    const auto [dweight, accumulate] = weight.gradient()->write();
    device.embedding_backward(stream, {ids.data<std::int32_t>(), dy.data<T>(), dweight.data<T>(), size(ids.count()),
                                       rows, width, accumulate});
  });
}

Tensor make_output(const Tensor& ids, const Tensor& weight) {
  require_dtype("embedding", "ids", ids, DType::i32);
  if (weight.shape().size() != 2)
    throw InvalidUsage("embedding: the table has shape " + to_string(weight.shape()) + ", needs [vocabulary, width]");
  Shape shape = ids.shape();
  shape.push_back(weight.dim(1));
  return Tensor::empty(weight.context(), std::move(shape), weight.dtype());
}

template <class T>
void rotate(KernelTable<T>& device, const Tensor& in, const GradientTarget& out, const RopeTable& table, bool inverse) {
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
  device.rope(in.context().stream(), args);
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
  look_up(ids, weight, y, false);
  if (Tape* tape = recording({weight}, y))
    tape->record("embedding", y, [ids, weight, dy = y.gradient()] { backward(ids, weight, dy->value()); });
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
  look_up(ids, tokens, y, false);
  look_up(order, positions, y, true);
  if (Tape* tape = recording({tokens, positions}, y))
    tape->record("embedding", y, [ids, order, tokens, positions, dy = y.gradient()] {
      if (tokens.requires_grad()) backward(ids, tokens, dy->value());
      if (positions.requires_grad()) backward(order, positions, dy->value());
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
  with_kernels("rope", x, [&](auto& device, Stream&) { rotate(device, x, {y, false}, table, false); });
  if (Tape* tape = recording({x}, y))
    tape->record("rope", y, [table, dx = slot_of(x), dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->acquire_reusing(*dy);
      with_kernels("rope", from, [&](auto& device, Stream&) { rotate(device, from, target, table, true); });
    });
  return y;
}

}  // namespace tessera::nn::ops
