// How the CUDA device calls cuBLASLt, on a fake of its functions.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tests/nn/ops/cuda/products_fixture.h"

namespace tessera::nn::test {
namespace {

template <class T>
struct Layer {
  explicit Layer(std::size_t inner = kIn) : in(inner), x(kRows * inner), weight(inner * kOut) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = T(std::sin(static_cast<float>(i)));
    for (std::size_t i = 0; i < weight.size(); ++i) weight[i] = T(std::cos(static_cast<float>(i)) / 4);
    for (std::size_t i = 0; i < kOut; ++i) bias[i] = T(static_cast<float>(i) - 7);
  }
  kernels::LinearForward<T> forward(bool gelu) {
    kernels::LinearForward<T> args{};
    args.shape.rows = kRows;
    args.shape.in = in;
    args.shape.out = kOut;
    args.shape.layout = kernels::WeightLayout::out_in;
    args.x = x.data();
    args.weight = weight.data();
    args.bias = bias.data();
    args.y = y.data();
    if (gelu) {
      args.activated = activated.data();
      args.activation = kernels::Activation::gelu_tanh;
    }
    return args;
  }
  /// The largest difference of y from the same sums in f64.
  double error() const {
    double worst = 0;
    for (std::size_t row = 0; row < kRows; ++row)
      for (std::size_t out = 0; out < kOut; ++out) {
        double sum = static_cast<float>(bias[out]);
        for (std::size_t k = 0; k < in; ++k)
          sum += static_cast<double>(static_cast<float>(x[row * in + k])) * static_cast<float>(weight[out * in + k]);
        worst = std::max(worst, std::abs(sum - static_cast<float>(y[row * kOut + out])));
      }
    return worst;
  }
  /// The largest difference of `activated` from GELU of y in f64.
  double gelu_error() const {
    double worst = 0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      const double v = static_cast<float>(y[i]);
      const double gelu = 0.5 * v * (1 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v)));
      worst = std::max(worst, std::abs(gelu - static_cast<float>(activated[i])));
    }
    return worst;
  }

  std::size_t in;
  std::vector<T> x, weight;
  std::vector<T> bias = std::vector<T>(kOut);
  std::vector<T> y = std::vector<T>(kRows * kOut);
  std::vector<T> activated = std::vector<T>(kRows * kOut);
};

/// The gradients of a layer's weight and bias.
template <class T>
struct Gradients {
  explicit Gradients(kernels::WeightLayout stored, bool accumulate) : layout(stored) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = T(std::sin(static_cast<float>(i)));
    for (std::size_t i = 0; i < dy.size(); ++i) dy[i] = T(std::cos(static_cast<float>(i)) + 0.5F);
    if (!accumulate) return;
    for (T& value : dweight) value = T(2);
    for (T& value : dbias) value = T(-3);
  }
  kernels::LinearBackward<T> args(bool accumulate) {
    kernels::LinearBackward<T> args{.shape = {kRows, kIn, kOut, layout}};
    args.x = x.data(), args.dy = dy.data(), args.dweight = dweight.data(), args.dbias = dbias.data();
    args.accumulate_dweight = args.accumulate_dbias = accumulate;
    return args;
  }
  /// The largest difference from the same sums in f64. `before`: what the sums were added to.
  double dweight_error(double before) const {
    double worst = 0;
    for (std::size_t in = 0; in < kIn; ++in)
      for (std::size_t out = 0; out < kOut; ++out) {
        double sum = before;
        for (std::size_t row = 0; row < kRows; ++row) sum += value(x[row * kIn + in]) * value(dy[row * kOut + out]);
        const bool out_in = layout == kernels::WeightLayout::out_in;
        worst = std::max(worst, std::abs(sum - value(dweight[out_in ? out * kIn + in : in * kOut + out])));
      }
    return worst;
  }
  double dbias_error(double before) const {
    double worst = 0;
    for (std::size_t out = 0; out < kOut; ++out) {
      double sum = before;
      for (std::size_t row = 0; row < kRows; ++row) sum += value(dy[row * kOut + out]);
      worst = std::max(worst, std::abs(sum - value(dbias[out])));
    }
    return worst;
  }
  static double value(T x) { return static_cast<float>(x); }

  kernels::WeightLayout layout;
  std::vector<T> x = std::vector<T>(kRows * kIn), dy = std::vector<T>(kRows * kOut);
  std::vector<T> dweight = std::vector<T>(kIn * kOut, T(NAN)), dbias = std::vector<T>(kOut, T(NAN));
};
constexpr kernels::WeightLayout kLayouts[] = {kernels::WeightLayout::out_in, kernels::WeightLayout::in_out};

class CudaProducts : public ProductsTest {
 protected:
  /// The kernels' whole forward: the product, and what it did not include.
  template <class T>
  void run(Layer<T>& layer, bool gelu) {
    const kernels::LinearForward<T> args = layer.forward(gelu);
    if constexpr (sizeof(T) == 4)
      kernels_->f32_kernels()->linear_forward(stream_, args);
    else
      kernels_->bf16_kernels()->linear_forward(stream_, args);
  }

  template <class T>
  void run(Gradients<T>& gradients, const kernels::LinearBackward<T>& args) {
    kernels_->of<T>()->linear_backward(stream_, args);
    const double exact = sizeof(T) == 4 ? 1e-5 : 0.06;
    if (args.dweight != nullptr) {
      EXPECT_LT(gradients.dweight_error(args.accumulate_dweight ? 2 : 0), exact);
    }
    EXPECT_LT(gradients.dbias_error(args.accumulate_dbias ? -3 : 0), exact);
  }
};

TEST_F(CudaProducts, IncludeBiasAndGeluWhereTheLibraryCan) {
  Layer<float> exact;
  run(exact, false);
  EXPECT_LT(exact.error(), 1e-5);
  Layer<bf16> half;
  run(half, true);
  EXPECT_LT(half.error(), 0.05);
  EXPECT_LT(half.gelu_error(), 0.05);
  EXPECT_EQ(fake_cublas_lt().products, 2);
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 2);
  EXPECT_EQ(stream_.launches, 2) << "each product is counted as work behind a host event";
  EXPECT_TRUE(logged_.empty());
}

TEST_F(CudaProducts, WithoutEpiloguesOtherKernelsAddBiasAndGelu) {
  fake_cublas_lt().no_epilogues = true;
  Layer<float> exact;
  run(exact, false);
  EXPECT_LT(exact.error(), 1e-5);
  Layer<bf16> half;
  run(half, true);
  EXPECT_LT(half.error(), 0.1);
  EXPECT_LT(half.gelu_error(), 0.1);
  EXPECT_EQ(fake_cublas_lt().products, 2);
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 0);
  ASSERT_EQ(logged_.size(), 1U) << "once for all";
  EXPECT_EQ(logged_[0],
            "cuda: cuBLASLt has no product of f32 with a bias for 5 x 16 x 24; this library's kernels compute it");
}

TEST_F(CudaProducts, BothWaysGiveTheSameSums) {
  Layer<float> with;
  run(with, false);
  fake_cublas_lt().no_epilogues = true;
  const auto without_epilogues =
      cuda::make_cuda_kernels(memory_, cuda::make_products(resources_, fake_cublas_lt_api()));
  Layer<float> without;
  without_epilogues->f32_kernels()->linear_forward(stream_, without.forward(false));
  EXPECT_EQ(with.y, without.y);
}

TEST_F(CudaProducts, BiasGradientsComeWithWeightGradients) {
  for (const auto layout : kLayouts) {
    Gradients<float> exact(layout, false);
    run(exact, exact.args(false));
    Gradients<bf16> half(layout, false);
    run(half, half.args(false));
    Gradients<float> second(layout, true);  // a weight shared with another layer, a bias of its own
    kernels::LinearBackward<float> args = second.args(true);
    args.accumulate_dbias = false;
    run(second, args);
  }
  EXPECT_EQ(fake_cublas_lt().products, 6);
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 6);
  EXPECT_TRUE(logged_.empty());
}

TEST_F(CudaProducts, BiasGradientsAreAddedByAnotherKernel) {
  for (const auto layout : kLayouts) {
    Gradients<float> exact(layout, true);
    run(exact, exact.args(true));
    Gradients<bf16> half(layout, true);
    run(half, half.args(true));
  }
  EXPECT_EQ(fake_cublas_lt().products, 4);
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 0) << "the library would overwrite them";
}

TEST_F(CudaProducts, BiasGradientsWithoutWeightGradientsNeedNoProduct) {
  Gradients<float> gradients(kernels::WeightLayout::out_in, false);
  kernels::LinearBackward<float> args = gradients.args(false);
  args.dweight = nullptr, args.x = nullptr;
  run(gradients, args);
  EXPECT_EQ(fake_cublas_lt().products, 0);
}

TEST_F(CudaProducts, WithoutSumsAnotherKernelComputesBiasGradients) {
  fake_cublas_lt().no_sums = true;
  for (const auto layout : kLayouts) {
    Gradients<bf16> half(layout, false);
    run(half, half.args(false));
  }
  EXPECT_EQ(fake_cublas_lt().products, 2);
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 0);
  ASSERT_EQ(logged_.size(), 1U);
  EXPECT_EQ(logged_[0],
            "cuda: cuBLASLt has no product of bf16 with the sums of an operand for 16 x 24 x 5; this library's kernels "
            "compute it");
}

TEST_F(CudaProducts, DetectsSumsOfTheOtherOperand) {
  Gradients<float> gradients(kernels::WeightLayout::out_in, false);
  kernels_->f32_kernels()->linear_backward(stream_, gradients.args(false));
  for (std::size_t out = 0; out < kOut; ++out) gradients.dbias[out] = 0;
  for (std::size_t row = 0; row < kRows; ++row)
    for (std::size_t out = 0; out < kOut; ++out) gradients.dbias[out] += gradients.x[row * kIn + out];
  EXPECT_GT(gradients.dbias_error(0), 0.5);
}

TEST_F(CudaProducts, WithoutAnyAlgorithmThereIsNoProduct) {
  fake_cublas_lt().no_algorithms = true;
  Layer<float> layer;
  EXPECT_THROW(run(layer, false), Unsupported);
}

/// The heuristic marks algorithms that can't be used; it is no error.
TEST_F(CudaProducts, AlgorithmsThatFailedAreNotUsed) {
  fake_cublas_lt().us = {0, 0, 0};
  fake_cublas_lt().failed_choices = 2;
  Layer<float> layer;
  run(layer, false);
  EXPECT_EQ(fake_cublas_lt().run, std::vector<int>{2});
  fake_cublas_lt().failed_choices = 3;
  Layer<float> other(kIn / 2);
  EXPECT_THROW(run(other, false), Unsupported);
}

/// Results of 16 bits: parts of a sum are not rounded to 16 bits before they are added.
TEST_F(CudaProducts, PartialSumsAreF32) {
  Layer<bf16> half;
  run(half, false);
  EXPECT_EQ(fake_cublas_lt().schemes, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
  Layer<float> exact;
  run(exact, false);
  EXPECT_EQ(fake_cublas_lt().schemes, CUBLASLT_REDUCTION_SCHEME_MASK);
}

/// The library sees the pointer when it chooses, and chooses anew for one with another alignment.
TEST_F(CudaProducts, AlgorithmsDependOnTheAlignmentOfTheBias) {
  Layer<bf16> layer;
  kernels::LinearForward<bf16> forward = layer.forward(false);
  kernels_->bf16_kernels()->linear_forward(stream_, forward);
  EXPECT_EQ(fake_cublas_lt().vector, forward.bias);
  kernels_->bf16_kernels()->linear_forward(stream_, forward);
  EXPECT_EQ(fake_cublas_lt().choices, 1);
  std::vector<bf16> bias(kOut + 1);
  forward.bias = bias.data() + 1;
  kernels_->bf16_kernels()->linear_forward(stream_, forward);
  EXPECT_EQ(fake_cublas_lt().choices, 2);
  EXPECT_EQ(fake_cublas_lt().vector, forward.bias);
}

TEST_F(CudaProducts, AnEmptySumIsTheBias) {
  Layer<float> layer(0);
  run(layer, false);
  EXPECT_EQ(layer.error(), 0);
  EXPECT_EQ(fake_cublas_lt().products, 0);
}

TEST_F(CudaProducts, RejectPaddedRowsWithBias) {
  Layer<float> layer;
  kernels::LinearForward<float> forward = layer.forward(false);
  forward.y_stride = kOut + 8;
  EXPECT_THROW(kernels_->f32_kernels()->linear_forward(stream_, forward), InvalidUsage);
}

TEST_F(CudaProducts, NoStreamWaitsForTheHostWhenAnAlgorithmIsLoaded) {
  Layer<float> layer;
  const int before = device_.host_waits;
  run(layer, false);
  EXPECT_EQ(device_.host_waits, before + 1);
  run(layer, false);
  EXPECT_EQ(device_.host_waits, before + 1) << "it is loaded";
  EXPECT_EQ(fake_cublas_lt().choices, 1);
}

}  // namespace
}  // namespace tessera::nn::test
