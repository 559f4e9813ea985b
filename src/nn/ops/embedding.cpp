#include "tessera/nn/ops/embedding.h"

#include "tessera/nn/ops/dispatch.h"

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

}  // namespace tessera::nn::ops
