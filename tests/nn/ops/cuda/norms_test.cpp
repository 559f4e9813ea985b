// Norms and sums over rows on CUDA, emulated: widths that one warp, several warps and no team hold in registers.
#include <numeric>

#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {
namespace {

template <class T>
class CudaNorms : public testing::Test {};
using Types = testing::Types<float, double, f16, bf16>;
TYPED_TEST_SUITE(CudaNorms, Types);

// In vectors of 2 to 8 elements: 1 to 4 for each thread of 1 to 8 warps; odd, and too wide to be held.
constexpr std::size_t kWidths[] = {8, 200, 512, 768, 1000, 1600, 4104, 8200, 771, 5001};

/// Inputs, which are numbers of type T, and outputs of both passes; each array is `offset` elements behind a multiple
/// of 16 bytes.
template <class U, class T>
struct NormArrays {
  NormArrays(std::size_t row_count, std::size_t row_width, std::size_t offset)
      : rows(row_count),
        width(row_width),
        x(numbers<T>("x", rows * width), offset),
        added(numbers<T>("added", rows * width), offset),
        dy(numbers<T>("dy", rows * width), offset),
        weight(numbers<T>("w", width), offset),
        bias(numbers<T>("b", width), offset),
        y(std::vector<double>(rows * width, NAN), offset),
        sum(std::vector<double>(rows * width, NAN), offset),
        dx(numbers<T>("dx", rows * width), offset),
        dweight(std::vector<double>(width, NAN), offset),
        dbias(std::vector<double>(width, NAN), offset),
        mean(std::vector<double>(rows, NAN)),
        rstd(std::vector<double>(rows, NAN)) {}

  kernels::NormForward<U> forward(kernels::RowNorm norm = kernels::RowNorm::layer) {
    const bool layer = norm == kernels::RowNorm::layer;
    return {.rows = rows,
            .width = width,
            .x = x.data(),
            .weight = weight.data(),
            .bias = layer ? bias.data() : nullptr,
            .eps = OpMath<U>(1e-3),
            .y = y.data(),
            .mean = layer ? mean.data() : nullptr,
            .rstd = rstd.data(),
            .norm = norm};
  }
  /// After a forward.
  kernels::NormBackward<U> backward(kernels::RowNorm norm = kernels::RowNorm::layer) {
    const bool layer = norm == kernels::RowNorm::layer;
    return {.rows = rows,
            .width = width,
            .x = x.data(),
            .weight = weight.data(),
            .mean = layer ? mean.data() : nullptr,
            .rstd = rstd.data(),
            .dy = dy.data(),
            .dx = dx.data(),
            .dweight = dweight.data(),
            .dbias = layer ? dbias.data() : nullptr,
            .accumulate_dx = true,
            .norm = norm};
  }
  std::vector<double> outputs() {
    return y.values() + mean.values() + rstd.values() + dx.values() + dweight.values() + dbias.values();
  }

  std::size_t rows, width;
  Array<U> x, added, dy, weight, bias, y, sum, dx, dweight, dbias;
  Array<OpMath<U>> mean, rstd;
};

/// Forward and backward of one norm. The RMS norm's outputs have no mean and no bias gradient.
template <class U, class T>
std::vector<double> norm_both_ways(KernelTable<U>& k, Stream& s, NormArrays<U, T>& a, kernels::RowNorm norm) {
  k.norm_forward(s, a.forward(norm));
  k.norm_backward(s, a.backward(norm));
  if (norm == kernels::RowNorm::layer) return a.outputs();
  return a.y.values() + a.rstd.values() + a.dx.values() + a.dweight.values();
}

TYPED_TEST(CudaNorms, EveryWidthIsAsInDouble) {
  for (const std::size_t width : kWidths)
    for (const kernels::RowNorm norm : {kernels::RowNorm::layer, kernels::RowNorm::rms})
      expect_as_in_double<TypeParam>(
          [&]<class U>(KernelTable<U>& k, Stream& s) {
            NormArrays<U, TypeParam> a(width < 1000 ? 37 : 3, width, 0);
            return norm_both_ways(k, s, a, norm);
          },
          100, 6.0);
}

#if !defined(TESSERA_TEST_HOST)
template <class T>
std::vector<double> norm_at(std::size_t width, std::size_t offset, kernels::RowNorm norm) {
  return Devices().on_device([&](DeviceKernels& kernels, Stream& s) {
    NormArrays<T, T> a(19, width, offset);
    return norm_both_ways(*kernels.of<T>(), s, a, norm);
  });
}

TYPED_TEST(CudaNorms, NoAddressShowsInTheBits) {
  for (const std::size_t width : {768U, 1600U, 4104U, 771U})
    for (const kernels::RowNorm norm : {kernels::RowNorm::layer, kernels::RowNorm::rms})
      EXPECT_TRUE(same_bits(norm_at<TypeParam>(width, 0, norm), norm_at<TypeParam>(width, 1, norm))) << width;
}

/// The control of the two tests above: the bits show in which order a row's elements are added.
TEST(CudaNormsOnly, AnotherOrderOfSumsShows) {
  const auto means = [](bool backwards) {
    return Devices().on_device([&](DeviceKernels& kernels, Stream& s) {
      NormArrays<float, float> a(19, 768, 0);
      auto values = a.x.values();
      if (backwards) std::reverse(values.begin(), values.end());
      Array<float> x(values);
      auto args = a.forward();
      args.x = x.data();
      kernels.f32_kernels()->norm_forward(s, args);
      auto result = a.mean.values();
      if (backwards) std::reverse(result.begin(), result.end());
      return result;
    });
  };
  EXPECT_FALSE(same_bits(means(false), means(true)));
}
#endif

TYPED_TEST(CudaNorms, ASumAndItsNormAreOneCall) {
  using T = TypeParam;
  for (const std::size_t width : {std::size_t{5}, std::size_t{768}, std::size_t{1600}, std::size_t{5001}})
    for (const kernels::RowNorm norm : {kernels::RowNorm::layer, kernels::RowNorm::rms})
      Devices().on_device([&](DeviceKernels& kernels, Stream& s) {
        KernelTable<T>& k = *kernels.of<T>();
        NormArrays<T, T> one(11, width, 0), two(11, width, 0);
        const auto with_sum = [&](auto args) {
          args.added = one.added.data(), args.sum = one.sum.data();
          return args;
        };
        const auto of_sum = [&](auto args) {
          k.add(s, {two.x.data(), two.added.data(), two.sum.data(), two.rows * width});
          args.x = two.sum.data();
          return args;
        };
        k.norm_forward(s, with_sum(one.forward(norm)));
        k.norm_forward(s, of_sum(two.forward(norm)));
        EXPECT_TRUE(same_bits(one.sum.values() + one.y.values() + one.rstd.values() + one.mean.values(),
                              two.sum.values() + two.y.values() + two.rstd.values() + two.mean.values()))
            << width;
        EXPECT_NE(one.sum.values(), one.x.values());
      });
}

TYPED_TEST(CudaNorms, GradientsAreIndependent) {
  using T = TypeParam;
  for (const std::size_t width : {std::size_t{5}, std::size_t{768}, std::size_t{1600}})
    expect_as_in_double<T>(
        [&]<class U>(KernelTable<U>& k, Stream& s) {
          std::vector<double> all;
          for (const int wanted : {1, 2, 4, 6}) {  // dx, dweight, dbias, both
            NormArrays<U, T> a(40, width, 0);
            k.norm_forward(s, a.forward());
            auto args = a.backward();
            if ((wanted & 1) == 0) args.dx = nullptr;
            if ((wanted & 2) == 0) args.dweight = nullptr;
            if ((wanted & 4) == 0) args.dbias = nullptr;
            k.norm_backward(s, args);
            if ((wanted & 1) != 0) all = all + a.dx.values();
            if ((wanted & 2) != 0) all = all + a.dweight.values();
            if ((wanted & 4) != 0) all = all + a.dbias.values();
          }
          return all;
        },
        60, 6.0);
}

TYPED_TEST(CudaNorms, BiasGradients) {
  using T = TypeParam;
  for (const std::size_t rows : {0U, 1U, 17U, 700U})
    for (const std::size_t width : {std::size_t{1}, std::size_t{139}, std::size_t{256}, std::size_t{776}})
      expect_as_in_double<T>(
          [&]<class U>(KernelTable<U>& k, Stream& s) {
            Array<U> dy(numbers<T>("dy", rows * width)), db(numbers<T>("db", width));
            Array<U> fresh = Array<U>::poisoned(width);
            kernels::LinearBackward<U> args{.shape = {rows, 3, width}, .dy = dy.data(), .dbias = db.data()};
            args.accumulate_dbias = true;
            k.linear_backward(s, args);
            args.dbias = fresh.data(), args.accumulate_dbias = false;
            k.linear_backward(s, args);
            return db.values() + fresh.values();
          },
          500);
}

#if !defined(TESSERA_TEST_HOST)
TYPED_TEST(CudaNorms, NoAddressShowsInBiasGradients) {
  using T = TypeParam;
  const auto at = [](std::size_t offset) {
    return Devices().on_device([&](DeviceKernels& kernels, Stream& s) {
      Array<T> dy(numbers<T>("dy", 300 * 776), offset), db(std::vector<double>(776, NAN), offset);
      kernels.of<T>()->linear_backward(s, {.shape = {300, 3, 776}, .dy = dy.data(), .dbias = db.data()});
      return db.values();
    });
  };
  EXPECT_TRUE(same_bits(at(0), at(1)));
}
#endif

}  // namespace
}  // namespace tessera::nn::test
