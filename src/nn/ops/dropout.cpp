#include "tessera/nn/ops/dropout.h"

#include "tessera/nn/kernels/dropout.h"
#include "tessera/nn/ops/dispatch.h"

namespace tessera::nn::ops {
namespace {

struct Mask {
  RandomState state;
  std::string module;
  double probability = 0;
  std::size_t samples = 0, elements = 0;
};

template <class T>
void apply(const Mask& mask, const Tensor& x, const Tensor& y, bool accumulate) {
  Context& context = y.context();
  context.stream().run([&pool = context.threads(), mask, from = x.data<T>(), to = y.data<T>(), accumulate] {
    const kernels::DropoutKey key{mask.state.seed, mask.state.step, mask.module,
                                  static_cast<std::uint64_t>(mask.state.first_sample)};
    kernels::dropout<T>(pool, {key, mask.probability, mask.samples, mask.elements, from, to, accumulate});
  });
}

}  // namespace

Tensor dropout(const Tensor& x, double probability, std::string_view module) {
  if (!(probability >= 0.0 && probability < 1.0))
    throw InvalidUsage("dropout: the probability is " + std::to_string(probability) + ", needs 0 <= p < 1");
  Context& context = x.context();
  if (probability == 0.0 || !context.training()) return x;
  const std::int64_t samples = x.dim(0);
  const Mask mask{context.random(), std::string(module), probability, size(samples),
                  samples == 0 ? 0 : size(x.count() / samples)};
  Tensor y = Tensor::empty(context, x.shape(), x.dtype());
  for_floating("dropout", x.dtype(), [&](auto zero) { apply<decltype(zero)>(mask, x, y, false); });
  if (Tape* tape = recording({x}, y))
    tape->record("dropout", y, [mask, dx = slot_of(x), dy = y.gradient()] {
      const Tensor from = dy->value();
      const GradientTarget target = dx->write_over(*dy);
      for_floating("dropout", from.dtype(),
                   [&](auto zero) { apply<decltype(zero)>(mask, from, target.tensor, target.accumulate); });
    });
  return y;
}

}  // namespace tessera::nn::ops
