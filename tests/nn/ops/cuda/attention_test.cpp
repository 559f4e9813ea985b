// CUDA attention, emulated, against the host's in double.
#include "tests/nn/ops/cuda/compare.h"

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

struct AttentionCase {
  std::size_t batch, positions, heads, kv_heads, dim;
  double dropout = 0;
  bool fused = false, accumulate = false;
  double scale = 0;
  std::size_t offset = 0;  ///< of all arrays from a multiple of 16 bytes, in elements

  std::size_t queries() const { return batch * positions * heads * dim; }
  std::size_t keys() const { return queries() / heads * kv_heads; }
};

/// Inputs of attention, and a run of its forward and backward: (kernels, stream) -> all outputs.
class AttentionRun {
 public:
  template <class T>
  static AttentionRun of(const AttentionCase& c, double deviation = 1.0) {
    return {c, numbers<T>("qkv", c.queries() + 2 * c.keys(), deviation), numbers<T>("dout", c.queries())};
  }
  template <class U>
  std::vector<double> operator()(KernelTable<U>& k, Stream& s) const {
    Array<U> in(qkv, c.offset), from(dout, c.offset), gradient(qkv, c.offset);
    Array<U> y = Array<U>::poisoned(c.queries(), c.offset);
    Array<OpMath<U>> statistics(std::vector<double>(c.queries() / c.dim, NAN));
    const kernels::AttentionShape shape{c.batch, c.positions, c.heads, c.kv_heads, c.dim, c.scale};
    const kernels::AttentionDropout dropout{c.dropout, dropout_stream(1, 2, "h.0.attn", 3)};
    const U* input = in.data();
    const std::size_t needed = std::max(k.attention_forward_scratch(shape), k.attention_backward_scratch(shape));
    Array<double> scratch(std::vector<double>(needed / sizeof(double) + 16, NAN));
    auto* aligned = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(scratch.data()) + 63) / 64 * 64);
    k.attention_forward(
        s, {shape, part(input, 0), part(input, 1), part(input, 2),
            kernels::heads_view<U>(y.data(), c.positions, c.heads, c.dim), statistics.data(), aligned, dropout});
    kernels::AttentionBackward<U> back{shape, part(input, 0), part(input, 1), part(input, 2)};
    back.out = kernels::heads_view<const U>(y.data(), c.positions, c.heads, c.dim);
    back.dout = kernels::heads_view<const U>(from.data(), c.positions, c.heads, c.dim);
    back.log_sum_exp = statistics.data();
    back.dq = part(gradient.data(), 0), back.dk = part(gradient.data(), 1), back.dv = part(gradient.data(), 2);
    back.accumulate_dq = back.accumulate_dk = back.accumulate_dv = c.accumulate;
    back.scratch = aligned, back.dropout = dropout;
    k.attention_backward(s, back);
    return y.values() + statistics.values() + gradient.values();
  }
  /// The index of element 0 of a position and head of q, k or v.
  std::size_t at(std::size_t index, std::size_t position, std::size_t head) const {
    const auto view = part(static_cast<const double*>(qkv.data()), index);
    return static_cast<std::size_t>(view.data - qkv.data()) + position * view.position_stride + head * view.head_stride;
  }

  AttentionCase c;
  std::vector<double> qkv, dout;

 private:
  AttentionRun(const AttentionCase& shape, std::vector<double> inputs, std::vector<double> upstream)
      : c(shape), qkv(std::move(inputs)), dout(std::move(upstream)) {}
  template <class P>
  kernels::HeadsView<P> part(P* data, std::size_t index) const {
    if (c.fused) return kernels::fused_qkv_view<P>(data, index, c.positions, c.heads, c.dim);
    P* const begin = data + (index == 0 ? 0 : c.queries() + (index - 1) * c.keys());
    return kernels::heads_view<P>(begin, c.positions, index == 0 ? c.heads : c.kv_heads, c.dim);
  }
};

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
