#include "tessera/nn/ops/dropout.h"

#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

struct Mask {
  RandomStream stream;
  double probability = 0;
  std::size_t samples = 0, elements = 0;
};

template <class T>
void apply(const Mask& mask, const Tensor& x, const Tensor& y, bool accumulate) {
  Context& context = y.context();
  context.kernels<T>("dropout").dropout(context.stream(), {mask.stream, mask.probability, mask.samples, mask.elements,
                                                           x.data<T>(), y.data<T>(), accumulate});
}

}  // namespace

Tensor dropout(const Tensor& x, double probability, std::string_view module) {
  if (!(probability >= 0.0 && probability < 1.0))
    throw InvalidUsage("dropout: the probability is " + std::to_string(probability) + ", needs 0 <= p < 1");
  Context& context = x.context();
  if (probability == 0.0 || !context.training()) return x;
  const std::int64_t samples = x.dim(0);
  const RngState& state = context.random();
  const Mask mask{dropout_stream(state.seed, state.step, module, static_cast<std::uint64_t>(state.first_sample)),
                  probability, size(samples), samples == 0 ? 0 : size(x.count() / samples)};
  Tensor y = Tensor::empty(context, x.shape(), x.dtype());
  for_floating("dropout", x.dtype(), [&](auto zero) { apply<decltype(zero)>(mask, x, y, false); });
  if (Tape* tape = recording({x}, y))
    tape->record("dropout", y, [mask, dx = slot_of(x), dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->acquire_reusing(*dy);
      for_floating("dropout", from.dtype(),
                   [&](auto zero) { apply<decltype(zero)>(mask, from, target.tensor, target.accumulate); });
    });
  return y;
}

}  // namespace tessera::nn::ops
