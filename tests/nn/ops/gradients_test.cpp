// Every operation's gradient against finite differences in double, odd shapes included.
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/attention.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tessera/nn/ops/dropout.h"
#include "tessera/nn/ops/embedding.h"
#include "tessera/nn/ops/linear.h"
#include "tessera/nn/ops/norm.h"
#include "tessera/nn/ops/rope.h"
#include "tests/nn/ops/finite_differences.h"

namespace tessera::nn::test {
namespace {

class Gradients : public testing::TestWithParam<int> {
 protected:
  Context context_{{.threads = GetParam()}};
  Tensor leaf(Shape shape, std::string_view name) { return test::leaf(context_, std::move(shape), name); }
  void expect(const Loss& loss, const std::vector<Tensor>& inputs, double tolerance = 1e-7) {
    expect_gradients(context_, loss, inputs, tolerance);
  }
};
INSTANTIATE_TEST_SUITE_P(Threads, Gradients, testing::Values(1, 2));

TEST_P(Gradients, Linear) {
  for (const auto layout : {ops::WeightLayout::out_in, ops::WeightLayout::in_out}) {
    const bool out_in = layout == ops::WeightLayout::out_in;
    const Tensor x = leaf({2, 3, 5}, "x"), flat = leaf({7, 5}, "flat"), b = leaf({9}, "b");
    const Tensor w = leaf(out_in ? Shape{9, 5} : Shape{5, 9}, "w");
    expect([&] { return weighted_sum(ops::linear(x, w, b, layout)); }, {x, w, b});
    expect([&] { return weighted_sum(ops::linear(flat, w, {}, layout)); }, {flat, w});
    expect([&] { return weighted_sum(ops::activated_linear(ops::Activation::gelu_tanh, x, w, b, layout)); }, {x, w, b});
  }
}

TEST_P(Gradients, DetectWrongGradient) {
  const Tensor x = leaf({3, 4}, "x");
  const auto wrong = [&] {
    Tensor y = ops::scale(x.detached(), 2.0);
    if (Tape* tape = recording({x}, y))
      tape->record("wrong", y, [x, dy = y.gradient()] { x.gradient()->accumulate(dy->value()); });
    return weighted_sum(y);
  };
  EXPECT_GT(gradient_error(context_, wrong, {x}, 0), 0.1);
}

TEST_P(Gradients, Norms) {
  for (const std::int64_t width : {1, 7, 33}) {
    const Tensor x = leaf({2, 3, width}, "x"), w = leaf({width}, "w"), b = leaf({width}, "b");
    expect([&] { return weighted_sum(ops::layer_norm(x, w, b)); }, {x, w, b}, 1e-6);
    expect([&] { return weighted_sum(ops::layer_norm(x, w, {})); }, {x, w}, 1e-6);
    expect([&] { return weighted_sum(ops::rms_norm(x, w)); }, {x, w}, 1e-6);
  }
}

TEST_P(Gradients, Activations) {
  using ops::Activation;
  const Tensor x = leaf({3, 11}, "x"), up = leaf({3, 11}, "up");
  for (const auto kind : {Activation::relu, Activation::gelu_tanh, Activation::gelu_erf, Activation::silu})
    expect([&] { return weighted_sum(ops::activation(kind, x)); }, {x});
  expect([&] { return weighted_sum(ops::swiglu(x, up)); }, {x, up});
  expect([&] { return weighted_sum(ops::swiglu(x, x)); }, {x});
}

TEST_P(Gradients, Arithmetic) {
  const Tensor a = leaf({3, 5}, "a"), b = leaf({3, 5}, "b");
  expect([&] { return weighted_sum(ops::add(a, b)); }, {a, b});
  expect([&] { return weighted_sum(ops::add(a, a)); }, {a});
  expect([&] { return weighted_sum(ops::scale(a, -1.5)); }, {a});
  expect([&] { return weighted_sum(ops::transpose(a)); }, {a});
  expect([&] { return weighted_sum(ops::linear(ops::reshape(a, {5, 3}), ops::reshape(b, {5, 3}))); }, {a, b});
}

TEST_P(Gradients, Embedding) {
  const Tensor table = leaf({5, 3}, "table"), positions = leaf({4, 3}, "positions");
  const Tensor tokens = ids(context_, {2, 3}, {4, 0, 4, 1, 1, 4});
  expect([&] { return weighted_sum(ops::embedding(tokens, table)); }, {table});
  expect([&] { return weighted_sum(ops::embedding(tokens, table, positions)); }, {table, positions});
}

TEST_P(Gradients, CausalAttention) {
  for (const std::int64_t positions : {1, 5, 67}) {
    const Tensor qkv = leaf({positions > 8 ? 1 : 2, positions, 3 * 2 * 3}, "qkv");
    expect([&] { return weighted_sum(ops::attention(qkv, 2)); }, {qkv}, 1e-6);
  }
  const Tensor q = leaf({2, 7, 4 * 3}, "q"), k = leaf({2, 7, 2 * 3}, "k"), v = leaf({2, 7, 2 * 3}, "v");
  expect([&] { return weighted_sum(ops::attention(q, k, v, {4, 2})); }, {q, k, v}, 1e-6);
}

TEST_P(Gradients, AttentionWithoutMask) {
  for (const std::int64_t positions : {1, 5, 67}) {
    const Tensor qkv = leaf({positions > 8 ? 1 : 2, positions, 3 * 2 * 3}, "qkv");
    expect([&] { return weighted_sum(ops::attention(qkv, 2, {.causal = false})); }, {qkv}, 1e-6);
  }
}

TEST_P(Gradients, AttentionWithDropout) {
  context_.random() = {.seed = 5, .step = 2, .first_sample = 3};
  const Tensor qkv = leaf({2, 67, 3 * 2 * 3}, "qkv");
  for (const bool causal : {true, false})
    expect([&] { return weighted_sum(ops::attention(qkv, 2, {causal, 0.3, "h.0.attn"})); }, {qkv}, 1e-6);
  const Tensor q = leaf({2, 5, 4 * 3}, "q"), k = leaf({2, 5, 2 * 3}, "k"), v = leaf({2, 5, 2 * 3}, "v");
  expect(
      [&] {
        return weighted_sum(ops::attention(q, k, v, {4, 2}, {.dropout = 0.3, .module = "h.0.attn"}));
      },
      {q, k, v}, 1e-6);
}

TEST_P(Gradients, AttentionDropoutIsKeyedBySampleAndKeepsMean) {
  constexpr std::int64_t kPositions = 130;
  const Tensor qkv = leaf({2, kPositions, 3 * 4}, "qkv");
  std::fill_n(qkv.data<double>(), qkv.count(), 1.0);  // every output is then the sum of its kept weights
  const TapeScope none(context_, nullptr);
  const auto run = [&](std::int64_t first_sample, std::string_view module, double probability = 0.5) {
    context_.random().first_sample = first_sample;
    const Tensor y = ops::attention(qkv, 2, {.dropout = probability, .module = module});
    return std::vector<double>(y.data<double>(), y.data<double>() + y.count());
  };
  const std::vector<double> first = run(0, "a"), second = run(1, "a");
  const std::size_t half = first.size() / 2;
  EXPECT_TRUE(std::equal(second.begin(), second.begin() + static_cast<std::ptrdiff_t>(half),
                         first.begin() + static_cast<std::ptrdiff_t>(half)));
  EXPECT_NE(first, run(0, "b"));
  double mean = 0;
  for (const double y : first) mean += y / static_cast<double>(first.size());
  EXPECT_NEAR(mean, 1.0, 0.1);
  for (const double y : run(0, "a", 0.0)) EXPECT_NEAR(y, 1.0, 1e-12);
  context_.set_training(false);
  EXPECT_EQ(run(0, "a"), run(0, "b"));
}

TEST_P(Gradients, AttentionIsCausal) {
  const Tensor qkv = leaf({1, 6, 3 * 4}, "qkv");
  const auto first_row = [&] {
    const TapeScope none(context_, nullptr);
    const Tensor y = ops::attention(qkv, 2);
    return std::vector<double>(y.data<double>(), y.data<double>() + 4 * 3);
  };
  const std::vector<double> before = first_row();
  qkv.data<double>()[4 * 12 + 5] += 3.0;  // a key at position 4 does not affect rows 0 to 2
  EXPECT_EQ(first_row(), before);
  qkv.data<double>()[1 * 12 + 5] += 3.0;  // a key at position 1 does
  EXPECT_NE(first_row(), before);
}

TEST_P(Gradients, Rope) {
  const ops::RopeTable table = ops::make_rope_table(context_, {.positions = 6, .dim = 4}, DType::f64);
  const Tensor x = leaf({2, 5, 3 * 4}, "x");
  // rope() works in place, so it needs a tensor of its own
  expect([&] { return weighted_sum(ops::rope(ops::scale(x, 1.0), table, 3)); }, {x});
}

TEST_P(Gradients, Dropout) {
  context_.random() = {.seed = 5, .step = 2, .first_sample = 3};
  const Tensor x = leaf({4, 3, 7}, "x");
  expect([&] { return weighted_sum(ops::dropout(x, 0.4, "h.0.drop")); }, {x});
}

TEST_P(Gradients, CrossEntropy) {
  const Tensor logits = leaf({2, 3, 5}, "logits");
  const Tensor targets = ids(context_, {2, 3}, {0, 4, ops::kIgnoreIndex, 2, 2, 1});
  expect([&] { return ops::cross_entropy(logits, targets); }, {logits});
  // over a product, so that the logits are not a leaf and can be overwritten
  const Tensor x = leaf({2, 3, 4}, "x"), w = leaf({5, 4}, "w");
  expect([&] { return ops::cross_entropy(ops::linear(x, w), targets, {.overwrite_logits = true}); }, {x, w});
}

TEST(PaddedGradients, CrossEntropyOfPaddedLogits) {
  Context context({.row_multiple = 4});
  const Tensor x = leaf(context, {2, 3, 4}, "x"), w = leaf(context, {5, 4}, "w");
  const Tensor targets = ids(context, {2, 3}, {0, 4, ops::kIgnoreIndex, 2, 2, 1});
  EXPECT_EQ(ops::padded_linear(x, w).shape(), (Shape{2, 3, 8}));
  for (const bool overwrite : {false, true}) {
    const ops::CrossEntropyOptions options{.overwrite_logits = overwrite, .vocabulary = 5};
    expect_gradients(context, [&] { return ops::cross_entropy(ops::padded_linear(x, w), targets, options); }, {x, w});
  }
  const TapeScope none(context, nullptr);
  const double packed = ops::cross_entropy(ops::linear(x, w), targets).item();
  EXPECT_EQ(ops::cross_entropy(ops::padded_linear(x, w), targets, {.vocabulary = 5}).item(), packed);
  EXPECT_THROW(ops::cross_entropy(ops::linear(x, w), targets, {.vocabulary = 6}), InvalidUsage);
  EXPECT_THROW(ops::cross_entropy(ops::linear(x, w), targets, {.vocabulary = 4}), InvalidUsage) << "target 4";
}

TEST_P(Gradients, CrossEntropyIsMeanOverValidTargets) {
  Tensor logits = leaf({2, 3}, "logits");
  const TapeScope none(context_, nullptr);
  std::fill_n(logits.data<double>(), 6, 0.25);
  EXPECT_NEAR(ops::cross_entropy(logits, ids(context_, {2}, {1, ops::kIgnoreIndex})).item(), std::log(3.0), 1e-12);
  EXPECT_EQ(ops::cross_entropy(logits, ids(context_, {2}, {ops::kIgnoreIndex, ops::kIgnoreIndex})).item(), 0.0);
  EXPECT_THROW(ops::cross_entropy(logits, ids(context_, {2}, {1, 3})), InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::test
