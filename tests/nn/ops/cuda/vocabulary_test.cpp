// CUDA kernels over a vocabulary, emulated, against the host's in double: the loss, products with padded rows of
// logits, and embeddings.
#include <numeric>

#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

template <class T>
class CudaVocabulary : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16>;
TYPED_TEST_SUITE(CudaVocabulary, Types);

/// Rows of logits, `stride` elements apart, with NaN or `padding` between them.
std::vector<double> strided(const std::vector<double>& packed, std::size_t row, std::size_t stride, double padding) {
  std::vector<double> apart(packed.size() / row * stride, padding);
  for (std::size_t i = 0; i < packed.size(); ++i) apart[i / row * stride + i % row] = packed[i];
  return apart;
}

struct LogitRows {
  std::size_t vocabulary, stride;
  std::vector<std::int32_t> targets;
};

/// Loss, statistics, and the gradient: added to something else, and in place.
template <class T>
void check_cross_entropy(const LogitRows& c) {
  const std::size_t rows = c.targets.size();
  auto logits = numbers<T>("logits", rows * c.vocabulary, 2.0);
  for (std::size_t i = 0; i < c.vocabulary / 2; ++i) logits[i] = -INFINITY;  // whole vectors, but not the row
  const auto apart = strided(logits, c.vocabulary, c.stride, NAN);
  const auto before = strided(numbers<T>("before", logits.size()), c.vocabulary, c.stride, 7.0);
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<U> x(apart), added(before);
        Array<OpMath<U>> max(std::vector<double>(rows, 0.0)), sum(std::vector<double>(rows, 0.0));
        Array<std::int32_t> chosen(std::vector<double>(c.targets.begin(), c.targets.end()));
        Array<double> loss({NAN}), valid({NAN}), upstream({3.0});
        k.cross_entropy_forward(s,
                                {{x.data(), chosen.data(), rows, c.vocabulary, -100, max.data(), sum.data(), c.stride},
                                 loss.data(),
                                 valid.data()});
        const auto backward = [&](U* out, bool accumulate) {
          k.cross_entropy_backward(s, {{x.data(), chosen.data(), rows, c.vocabulary, -100, max.data(), sum.data(),
                                        OpMath<U>(0), out, accumulate, c.stride},
                                       upstream.data(),
                                       valid.data()});
        };
        backward(added.data(), true);
        backward(x.data(), false);
        std::vector<double> statistics;
        for (std::size_t row = 0; row < rows; ++row)
          if (c.targets[row] >= 0) statistics.push_back(sum.values()[row]);
        return loss.values() + valid.values() + added.values() + x.values() + statistics;
      },
      40);
}

/// Rows that are packed or padded, to vectors of 16 bytes or not; rows of many vectors for each thread, and of one
/// token.
TYPED_TEST(CudaVocabulary, CrossEntropyWithIgnoredTargetsAndInPlace) {
  const std::vector<std::int32_t> some{200, 300, -100, 17, 17, -100, 255, 256, 5}, none(9, -100);
  for (const auto& targets : {some, none})
    for (const std::size_t stride : {301U, 303U, 304U, 384U}) check_cross_entropy<TypeParam>({301, stride, targets});
  check_cross_entropy<TypeParam>({9001, 9088, {9000, 8999, -100}});
  check_cross_entropy<TypeParam>({9001, 9001, {9000, 8191}});
  check_cross_entropy<TypeParam>({9088, 9088, {9087, 4544}});
  check_cross_entropy<TypeParam>({1, 128, {0, 0}});
}

TYPED_TEST(CudaVocabulary, LinearWithPaddedRows) {
  using T = TypeParam;
  const std::size_t rows = 53, in = 7, out = 139, stride = 144;
  const auto x = numbers<T>("x", rows * in), w = numbers<T>("w", in * out);
  const auto dy = strided(numbers<T>("dy", rows * out), out, stride, NAN);
  for (const auto layout : {kernels::WeightLayout::out_in, kernels::WeightLayout::in_out}) {
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          Array<U> a(x), weight(w), from(dy), dx(x), y(dy);
          Array<U> dw = Array<U>::poisoned(w.size());
          const kernels::LinearShape shape{rows, in, out, layout};
          k.linear_forward(s,
                           {.shape = shape, .x = a.data(), .weight = weight.data(), .y = y.data(), .y_stride = stride});
          k.linear_backward(s, {.shape = shape,
                                .x = a.data(),
                                .weight = weight.data(),
                                .dy = from.data(),
                                .dx = dx.data(),
                                .dweight = dw.data(),
                                .accumulate_dx = true,
                                .dy_stride = stride});
          std::vector<double> results = dx.values() + dw.values();
          const std::vector<double> padded = y.values();
          for (std::size_t i = 0; i < padded.size(); ++i)
            if (i % stride < out) results.push_back(padded[i]);
          return results;
        },
        200);
  }
}

struct Ids {
  std::size_t vocabulary, width;
  std::vector<std::int32_t> ids;
};

template <class T>
void check_embedding(const Ids& c) {
  const std::size_t rows = c.ids.size();
  const auto table = numbers<T>("table", c.vocabulary * c.width), dy = numbers<T>("dy", rows * c.width, 0.25);
  expect_as_in_double<T>(
      [&]<class U>(KernelTable<U>& k, Stream& s) {
        Array<std::int32_t> ids(std::vector<double>(c.ids.begin(), c.ids.end()));
        Array<U> weight(table), from(dy), y(dy), dweight(table);
        Array<U> fresh = Array<U>::poisoned(table.size()), looked_up = Array<U>::poisoned(dy.size());
        k.embedding_forward(s, {weight.data(), ids.data(), looked_up.data(), rows, c.vocabulary, c.width, false});
        k.embedding_forward(s, {weight.data(), ids.data(), y.data(), rows, c.vocabulary, c.width, true});
        k.embedding_backward(s, {ids.data(), from.data(), fresh.data(), rows, c.vocabulary, c.width, false});
        k.embedding_backward(s, {ids.data(), from.data(), dweight.data(), rows, c.vocabulary, c.width, true});
        return looked_up.values() + y.values() + fresh.values() + dweight.values();
      },
      200);
}

/// As in text: the k-th most frequent id occurs about 1 / k as often as the first.
std::vector<std::int32_t> zipf(std::size_t rows, std::size_t vocabulary) {
  std::vector<std::int32_t> ids(rows);
  for (std::size_t i = 0; i < rows; ++i) {
    const double quantile = static_cast<double>(i * 2654435761U % (1U << 24)) / (1U << 24);
    ids[i] = static_cast<std::int32_t>(std::pow(static_cast<double>(vocabulary), quantile)) - 1;
  }
  return ids;
}

/// Widths of whole vectors and others; ids by frequency, one id for all rows, another for each, few rows, and ids of
/// three digits of the sort.
TYPED_TEST(CudaVocabulary, EmbeddingForwardAndBackward) {
  std::vector<std::int32_t> each(300), few{300, 0, 300};
  std::iota(each.rbegin(), each.rend(), 0);
  for (const std::size_t width : {33U, 136U}) check_embedding<TypeParam>({301, width, zipf(700, 301)});
  for (const std::size_t width : {5U, 8U}) {
    check_embedding<TypeParam>({301, width, std::vector<std::int32_t>(2500, 300)});
    check_embedding<TypeParam>({301, width, each});
    check_embedding<TypeParam>({301, width, few});
    check_embedding<TypeParam>({301, width, {}});
  }
  check_embedding<TypeParam>({70000, 2, zipf(1500, 70000)});
}

#if !defined(TESSERA_TEST_HOST)
TEST(CudaVocabularyOnly, InvalidIdsAndTargetsBecomeNaN) {
  Devices().on_device([](DeviceKernels& kernels, Stream& stream) {
    KernelTable<float>& k = *kernels.f32_kernels();
    Array<float> table(std::vector<double>(4, 1.0)), y(std::vector<double>(6));
    Array<std::int32_t> ids({1, 2, -1}), targets({0, 4});
    k.embedding_forward(stream, {table.data(), ids.data(), y.data(), 3, 2, 2, false});
    EXPECT_EQ(y.values()[0], 1.0);
    for (std::size_t i = 2; i < 6; ++i) EXPECT_TRUE(std::isnan(y.values()[i])) << i;
    Array<double> loss({0.0}), valid({0.0});
    k.cross_entropy_forward(stream, {{table.data(), targets.data(), 2, 2, -100}, loss.data(), valid.data()});
    EXPECT_TRUE(std::isnan(loss.values()[0]));
  });
}

TEST(CudaVocabularyOnly, InvalidIdsHaveNoGradient) {
  Devices().on_device([](DeviceKernels& kernels, Stream& stream) {
    Array<float> dy({1, 2, 3, 4, 5, 6}), table = Array<float>::poisoned(4);
    Array<std::int32_t> ids({1, 2, -1});
    kernels.f32_kernels()->embedding_backward(stream, {ids.data(), dy.data(), table.data(), 3, 2, 2, false});
    EXPECT_EQ(table.values(), (std::vector<double>{0, 0, 1, 2}));
  });
}

/// The maximum ignores NaN, the sum must not.
TEST(CudaVocabularyOnly, OneLogitThatIsNaNMakesTheLossNaN) {
  Devices().on_device([](DeviceKernels& kernels, Stream& stream) {
    const auto loss_of = [&]<class T>(KernelTable<T>& k, double odd) {
      std::vector<double> logits(512, 1.0);
      logits[300] = odd;
      Array<T> x(logits);
      Array<std::int32_t> targets({5});
      Array<double> loss({0.0}), valid({0.0});
      k.cross_entropy_forward(stream, {{x.data(), targets.data(), 1, 512, -100}, loss.data(), valid.data()});
      return loss.values()[0];
    };
    for (const double odd : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      EXPECT_TRUE(std::isnan(loss_of(*kernels.f32_kernels(), odd)));
      EXPECT_TRUE(std::isnan(loss_of(*kernels.bf16_kernels(), odd)));
    }
    EXPECT_NEAR(loss_of(*kernels.bf16_kernels(), -INFINITY), std::log(511.0), 1e-5);
  });
}
#endif

}  // namespace
}  // namespace tessera::nn::test
