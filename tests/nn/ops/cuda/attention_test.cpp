// CUDA attention, emulated, against the host's in double.
#include "tests/nn/ops/cuda/attention_run.h"

namespace tessera::nn::test {
namespace {

template <class T>
class CudaAttention : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16>;
TYPED_TEST_SUITE(CudaAttention, Types);
/// Cases of several blocks, of which f64 would add none: its tiles are f32's or smaller.
template <class T>
class CudaBlockedAttention : public testing::Test {};
using BlockedTypes = testing::Types<float, f16, bf16>;
TYPED_TEST_SUITE(CudaBlockedAttention, BlockedTypes);

constexpr double kUnits = 400;
constexpr double kShortUnits = 8;  // matrix units round weights and their gradients before the next product

template <class T>
void check(const AttentionCase& c, double deviation = 1.0) {
  SCOPED_TRACE(std::to_string(c.positions) + " positions, heads of " + std::to_string(c.dim));
  expect_as_in_double<T>(AttentionRun::of<T>(c, deviation), kUnits, kShortUnits);
}

TYPED_TEST(CudaAttention, OfUnevenShapes) {
  const AttentionCase cases[] = {
      {1, 1, 1, 1, 8, 0.0, true},           {2, 67, 2, 2, 5, 0.0, true, true},    {1, 130, 4, 2, 16},
      {1, 66, 1, 1, 64, 0.0, true, true},   {2, 33, 2, 1, 12, 0.25, false, true}, {1, 65, 1, 1, 65, 0.1, true},
      {1, 17, 2, 2, 130, 0.0, true, false}, {1, 129, 2, 1, 64, 0.1, false, true}, {1, 70, 1, 1, 128, 0.0, true, true}};
  for (const AttentionCase& c : cases) check<TypeParam>(c);
}

/// Several blocks of queries and of keys, whose parts of dq add up; heads of each width, shared by queries or not.
TYPED_TEST(CudaBlockedAttention, OfSeveralBlocks) {
  check<TypeParam>({.batch = 1, .positions = 321, .heads = 2, .kv_heads = 1, .dim = 64});
  check<TypeParam>({.batch = 1, .positions = 257, .heads = 1, .kv_heads = 1, .dim = 104, .accumulate = true});
  check<TypeParam>({.batch = 2, .positions = 256, .heads = 1, .kv_heads = 1, .dim = 32, .fused = true});
  check<TypeParam>({.batch = 1, .positions = 272, .heads = 1, .kv_heads = 1, .dim = 48, .dropout = 0.3});
  check<TypeParam>({.batch = 1, .positions = 270, .heads = 1, .kv_heads = 1, .dim = 128, .dropout = 0.2});
}

TYPED_TEST(CudaAttention, OfRowsThatAreNotAligned) {
  for (const std::size_t dim : {30U, 64U, 128U})
    check<TypeParam>({.batch = 1, .positions = 70, .heads = 2, .kv_heads = 2, .dim = dim, .fused = true, .offset = 1});
}

/// All keys, also those of later tiles; a last tile that is not whole.
TYPED_TEST(CudaAttention, WithoutMask) {
  for (const std::size_t positions : {1U, 33U, 64U, 130U})
    check<TypeParam>({.batch = 2, .positions = positions, .heads = 2, .kv_heads = 1, .dim = 24, .causal = false});
  check<TypeParam>({.batch = 1,
                    .positions = 70,
                    .heads = 1,
                    .kv_heads = 1,
                    .dim = 64,
                    .dropout = 0.2,
                    .fused = true,
                    .accumulate = true,
                    .causal = false});
}

/// Any scale, also a negative one, for which the largest product is the smallest score.
TYPED_TEST(CudaAttention, OfOtherScales) {
  for (const double scale : {0.03, -0.2})
    check<TypeParam>(
        {.batch = 1, .positions = 75, .heads = 2, .kv_heads = 1, .dim = 24, .accumulate = true, .scale = scale});
}

/// Scores of some hundreds: most weights are zero in f32, and the largest score of a row grows from tile to tile.
TYPED_TEST(CudaBlockedAttention, OfLargeScores) {
  AttentionRun run = AttentionRun::of<TypeParam>({.batch = 1, .positions = 200, .heads = 1, .kv_heads = 1, .dim = 64});
  for (std::size_t p = 0; p < run.c.positions; ++p)
    for (std::size_t d = 0; d < run.c.dim; ++d) {
      run.qkv[run.at(0, p, 0) + d] = d % 2 == 0 ? 4.0 : -0.5;
      run.qkv[run.at(1, p, 0) + d] = static_cast<double>(p / 4) / 4 - (d % 2 == 0 ? 0.0 : 1.0);
    }
  expect_as_in_double<TypeParam>(run, 4000, 24);  // keys of up to 12 multiply the rounding of dq
}

/// The outputs of one order of threads.
template <class T>
std::vector<double> outputs(const AttentionRun& run) {
  Devices devices;
  return devices.on_device([&](DeviceKernels& k, Stream& stream) { return run(*k.of<T>(), stream); });
}

/// A later key changes neither the output nor, where its own gradient is unchanged, dq of an earlier query.
TYPED_TEST(CudaAttention, IsCausal) {
  const AttentionRun run =
      AttentionRun::of<TypeParam>({.batch = 1, .positions = 140, .heads = 1, .kv_heads = 1, .dim = 16});
  const std::vector<double> before = outputs<TypeParam>(run);
  for (const std::size_t position : {31U, 64U, 100U, 129U}) {
    AttentionRun changed = run;
    for (std::size_t d = 0; d < 16; ++d)
      changed.qkv[run.at(1, position, 0) + d] = changed.qkv[run.at(2, position, 0) + d] = 100.0;
    const std::vector<double> after = outputs<TypeParam>(changed);
    const std::size_t gradient = run.c.queries() + run.c.positions;  // of q, after output and statistics
    for (std::size_t i = 0; i < position * 16; ++i) {
      ASSERT_EQ(after[i], before[i]) << "output " << i << ", changed at " << position;
      ASSERT_EQ(after[gradient + i], before[gradient + i]) << "dq " << i << ", changed at " << position;
    }
    EXPECT_NE(after[position * 16], before[position * 16]);
  }
}

/// Negative control: the tolerance of these tests is less than the effect of one key among hundreds.
TEST(CudaAttentionControl, ToleranceDetectsOneLostKey) {
  const AttentionRun run = AttentionRun::of<bf16>({.batch = 1, .positions = 150, .heads = 1, .kv_heads = 1, .dim = 16});
  AttentionRun lost = run;
  for (std::size_t d = 0; d < 16; ++d) lost.qkv[run.at(2, 40, 0) + d] = 0;
  const std::vector<double> all = outputs<bf16>(run), without = outputs<bf16>(lost);
  std::size_t detected = 0;
  for (std::size_t i = 0; i < run.c.queries(); ++i)
    detected += std::abs(all[i] - without[i]) > kShortUnits * unit<bf16>() * std::max(1.0, std::abs(all[i])) ? 1 : 0;
  EXPECT_GT(detected, 40U);
}

#if !defined(TESSERA_TEST_HOST)
TEST(CudaAttentionOnly, RejectsTooLargeHeads) {
  Devices devices;
  kernels::AttentionForward<float> args;
  args.shape = {1, 1, 1, 1, 300, 0.0};
  EXPECT_THROW(devices.kernels->f32_kernels()->attention_forward(devices.stream, args), Unsupported);
}
#endif

}  // namespace
}  // namespace tessera::nn::test
