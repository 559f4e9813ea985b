// Pool memory of operations: fused attention allocates nothing of size positions^2, a residual branch costs no copy,
// and the logits' gradient reuses the logits' memory.
#include "tessera/nn/ops/activation.h"
#include "tessera/nn/ops/arithmetic.h"
#include "tessera/nn/ops/attention.h"
#include "tessera/nn/ops/cross_entropy.h"
#include "tessera/nn/ops/linear.h"
#include "tests/nn/ops/finite_differences.h"

namespace tessera::nn::test {
namespace {

/// Peak of `activation` during `loss` and its backward, beyond what was live before; in bytes.
std::uint64_t peak(Context& context, const Loss& loss) {
  context.memory_tracker().reset_peaks();
  const std::uint64_t before = context.memory_tracker().snapshot().now_of(MemoryCategory::activation);
  Tape tape;
  const TapeScope scope(context, &tape);
  tape.backward(loss());
  return context.memory_tracker().snapshot().peak_of(MemoryCategory::activation) - before;
}

TEST(OperationMemory, AttentionAt8192PositionsIsBounded) {
  constexpr std::int64_t kPositions = 8192, kDim = 8;
  constexpr std::uint64_t kMax =
      4U << 20U;  // inputs' gradient 0.8 MB, output and its gradient 0.5 MB, blocks of scratch
  Context context;
  const Tensor qkv = leaf(context, {1, kPositions, 3 * kDim}, "qkv", DType::f32);
  EXPECT_LT(peak(context, [&] { return weighted_sum(ops::attention(qkv, 1)); }), kMax);
  // The control: scores in memory are detected.
  const auto with_scores = [&] {
    const Tensor scores = Tensor::empty(context, {kPositions, kPositions}, DType::f32);
    return weighted_sum(ops::attention(qkv, 1));
  };
  EXPECT_GT(peak(context, with_scores), 60 * kMax);
}

TEST(OperationMemory, ResidualBranchIsNotCopied) {
  Context context;
  const Tensor x = leaf(context, {64, 64}, "x"), w = leaf(context, {64, 64}, "w");
  const std::uint64_t one = x.bytes();
  // forward: the branch and the sum; backward: the gradient of the sum is that of x and of the branch, and dw.
  const Loss residual = [&] { return weighted_sum(ops::add(x, ops::linear(x, w))); };
  EXPECT_LE(peak(context, residual), 3 * one + 1024);
  x.gradient()->clear();
  w.gradient()->clear();
  const Loss copying = [&] { return weighted_sum(ops::add(ops::scale(x, 1.0), ops::scale(ops::linear(x, w), 1.0))); };
  EXPECT_GT(peak(context, copying), 3 * one + 1024);
}

TEST(OperationMemory, GradientOverwritesLogits) {
  Context context;
  const Tensor x = leaf(context, {32, 4}, "x"), w = leaf(context, {1000, 4}, "w");
  const Tensor targets = ids(context, {32}, std::vector<std::int32_t>(32, 7));
  const std::uint64_t logits = 32 * 1000 * sizeof(double);
  const auto loss = [&](bool overwrite) {
    x.gradient()->clear();
    w.gradient()->clear();
    return peak(context,
                [&] { return ops::cross_entropy(ops::linear(x, w), targets, {.overwrite_logits = overwrite}); });
  };
  EXPECT_LT(loss(true), logits * 3 / 2);
  EXPECT_GE(loss(false), logits * 2);
}

}  // namespace
}  // namespace tessera::nn::test
