// Operations on a stream that runs its work late.
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/linear.h"
#include "tests/nn/ops/finite_differences.h"

namespace tessera::nn::test {
namespace {

struct Outcome {
  double loss = 0;
  std::vector<double> gradient;
  bool operator==(const Outcome&) const = default;
};

ContextOptions lazy() { return {.make_stream = make_lazy_stream}; }

Tensor two_layers(const Tensor& x, const Tensor& w) {
  return weighted_sum(ops::add(x, ops::linear(ops::gelu_tanh(ops::linear(x, w)), w)));
}

/// One step whose weights arrive from another stream; `ordered`: the compute stream waits for them.
Outcome step(const ContextOptions& options, bool ordered) {
  Context context(options);
  const Tensor x = leaf(context, {3, 4}, "x"), source = leaf(context, {4, 4}, "w");
  std::vector<double> memory(16, 0.0);
  Tensor w = Tensor::unbound(context, {4, 4}, DType::f64, "w");
  w.bind(memory.data());
  w.set_requires_grad(true);
  const auto other = context.make_stream();
  other->run([&] { std::copy_n(source.data<double>(), 16, memory.begin()); });
  if (ordered) context.stream().wait(other->record());
  Tape tape;
  const TapeScope scope(context, &tape);
  const Tensor loss = two_layers(x, w);
  tape.backward(loss);
  Outcome outcome{loss.item(), {}};
  const double* gradient = w.gradient()->value().data<double>();
  outcome.gradient.assign(gradient, gradient + 16);
  other->synchronize();
  return outcome;
}

TEST(LazyStream, IsBitwiseEqual) { EXPECT_EQ(step(lazy(), true), step({}, true)); }

TEST(LazyStream, DetectsMissingDependency) {
  EXPECT_NE(step(lazy(), false), step({}, true));
  EXPECT_EQ(step({}, false), step({}, true));  // an immediate stream hides the missing dependency
}

TEST(LazyStream, ReusesMemoryInStreamOrder) {
  ContextOptions options = lazy();
  options.memory = {.pooled_from = 1, .poison = true};
  EXPECT_EQ(step(options, true), step({}, true));
}

}  // namespace
}  // namespace tessera::nn::test
