// How the CUDA device calls cuBLASLt, on a fake of its functions.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "tessera/base/device_stream.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/nn/kernels/cuda/matmul_table.cuh"
#include "tests/harness/limited_device.h"
#include "tests/nn/ops/cuda/fake_cublas_lt.h"

namespace tessera::nn::test {
namespace {

class HostStream final : public base::DeviceStream {
 public:
  HostStream() : DeviceStream({base::DeviceType::cuda, 0}, false) {}
  void* native() const noexcept override { return nullptr; }
  void prepare_launch() override { ++launches; }
  base::Event record() override { return {}; }
  void wait(const base::Event&) override {}
  int launches = 0;
};

constexpr std::size_t kRows = 5;
constexpr std::size_t kIn = 24;
constexpr std::size_t kOut = 16;

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
/// A language-model head [out, in] without a bias, whose rows of logits are `stride` elements apart.
struct Head {
  Head(std::size_t outputs, std::size_t apart) : out(outputs), stride(apart) {
    const auto fill = [](std::vector<bf16>& values, float phase) {
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = bf16(std::sin(static_cast<float>(i) + phase));
    };
    fill(x, 0), fill(weight, 1), fill(y, 2), fill(dx, 3), fill(dweight, 4);
    for (std::size_t row = 0; row < kRows; ++row)
      for (std::size_t i = out; i < stride; ++i) y[row * stride + i] = kPadding;
  }
  kernels::LinearForward<bf16> forward() {
    return {.shape = {kRows, kIn, out}, .x = x.data(), .weight = weight.data(), .y = y.data(), .y_stride = stride};
  }
  /// y is its own gradient.
  kernels::LinearBackward<bf16> backward(bool accumulate) {
    return {.shape = {kRows, kIn, out},
            .x = x.data(),
            .weight = weight.data(),
            .dy = y.data(),
            .dx = dx.data(),
            .dweight = dweight.data(),
            .accumulate_dx = accumulate,
            .accumulate_dweight = accumulate,
            .dy_stride = stride};
  }
  bool padding_kept() const {
    for (std::size_t row = 0; row < kRows; ++row)
      for (std::size_t i = out; i < stride; ++i)
        if (y[row * stride + i].bits != kPadding.bits) return false;
    return true;
  }

  static constexpr bf16 kPadding = bf16::of_bits(0x7fc0);  // NaN: a product that reads it shows
  std::size_t out, stride;
  std::vector<bf16> x = std::vector<bf16>(kRows * kIn);
  std::vector<bf16> weight = std::vector<bf16>(out * kIn);
  std::vector<bf16> y = std::vector<bf16>(kRows * stride);
  std::vector<bf16> dx = std::vector<bf16>(kRows * kIn);
  std::vector<bf16> dweight = std::vector<bf16>(out * kIn);
};

/// The largest difference of `got` from before * factor + the sums of left[i, k] right[k, j].
template <class Left, class Right>
double difference(const std::vector<bf16>& got, const std::vector<bf16>& before, std::size_t columns, std::size_t inner,
                  const Left& left, const Right& right) {
  double worst = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    double sum = before.empty() ? 0 : static_cast<float>(before[i]);
    for (std::size_t k = 0; k < inner; ++k)
      sum += static_cast<double>(static_cast<float>(left(i / columns, k))) * static_cast<float>(right(k, i % columns));
    worst = std::max(worst, std::abs(sum - static_cast<float>(got[i])) / std::max(1.0, std::abs(sum)));
  }
  return worst;
}

/// True if a kernel can load and store all matrices by 16 bytes: starts, leading dimensions and extents.
bool wide(const FakeProduct& product) {
  const auto matrix_is_wide = [](const FakeMatrix& m) {
    return m.rows % 8 == 0 && m.stride % 8 == 0 && reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0;
  };
  return matrix_is_wide(product.a) && matrix_is_wide(product.b) && matrix_is_wide(product.c);
}

class CudaProducts : public testing::Test {
 protected:
  void SetUp() override { fake_cublas_lt() = {}; }

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

  std::vector<std::string> logged_;
  HostStream stream_;
  tessera::test::LimitedDevice device_{std::size_t{1} << 30};
  MemoryPool memory_{std::make_shared<base::MemoryTracker>()};
  ThreadPool threads_{1};
  const KernelResources resources_{
      device_, memory_, threads_,
      std::make_shared<base::Logger>(base::LogLevel::info,
                                     [this](base::LogLevel, std::string_view text) { logged_.emplace_back(text); })};
  const std::unique_ptr<DeviceKernels> kernels_ =
      cuda::make_cuda_kernels(memory_, cuda::make_products(resources_, fake_cublas_lt_api()));
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

TEST_F(CudaProducts, AnEmptySumIsTheBias) {
  Layer<float> layer(0);
  run(layer, false);
  EXPECT_EQ(layer.error(), 0);
  EXPECT_EQ(fake_cublas_lt().products, 0);
}

TEST_F(CudaProducts, PaddedRowsOfLogitsMakeWideProducts) {
  for (const bool accumulate : {false, true}) {
    SetUp();
    Head head(21, 32);
    const std::vector<bf16> dx = head.dx, dweight = head.dweight, none;
    KernelTable<bf16>& k = *kernels_->bf16_kernels();
    k.linear_forward(stream_, head.forward());
    EXPECT_TRUE(head.padding_kept());
    const auto logit = [&](std::size_t row, std::size_t i) { return head.y[row * 32 + i]; };
    for (std::size_t row = 0; row < kRows; ++row)
      EXPECT_LT(difference(
                    {head.y.begin() + static_cast<long>(row * 32), head.y.begin() + static_cast<long>(row * 32 + 21)},
                    none, 21, kIn, [&](std::size_t, std::size_t i) { return head.x[row * kIn + i]; },
                    [&](std::size_t i, std::size_t out) { return head.weight[out * kIn + i]; }),
                0.01);
    k.linear_backward(stream_, head.backward(accumulate));
    EXPECT_LT(difference(head.dx, accumulate ? dx : none, kIn, 21, logit,
                         [&](std::size_t out, std::size_t i) { return head.weight[out * kIn + i]; }),
              0.02);
    EXPECT_LT(difference(
                  head.dweight, accumulate ? dweight : none, kIn, kRows,
                  [&](std::size_t out, std::size_t row) { return logit(row, out); },
                  [&](std::size_t row, std::size_t i) { return head.x[row * kIn + i]; }),
              0.02);
    // Of each of the three products one part has 16 columns, and one the other 5.
    const std::vector<FakeProduct>& products = fake_cublas_lt().matrices;
    ASSERT_EQ(products.size(), 6U);
    EXPECT_EQ(std::count_if(products.begin(), products.end(), wide), 3);
    for (const FakeProduct& product : products)
      for (const FakeMatrix* matrix : {&product.a, &product.b, &product.c}) {
        EXPECT_EQ(matrix->stride % 8, 0);
        EXPECT_EQ(reinterpret_cast<std::uintptr_t>(matrix->data) % 16, 0U);
      }
    EXPECT_EQ(products[0].c.stride, 32);
    EXPECT_EQ(products[0].c.rows, 16U);
    EXPECT_EQ(products[1].c.rows, 5U);
  }
}

TEST_F(CudaProducts, DetectsPackedRowsOfLogits) {
  Head head(21, 21);
  kernels_->bf16_kernels()->linear_forward(stream_, head.forward());
  kernels_->bf16_kernels()->linear_backward(stream_, head.backward(false));
  ASSERT_EQ(fake_cublas_lt().matrices.size(), 3U);
  for (const FakeProduct& product : fake_cublas_lt().matrices) EXPECT_FALSE(wide(product));
}

TEST_F(CudaProducts, ColumnsThatFitAreOneProduct) {
  Head head(24, 32);
  kernels_->bf16_kernels()->linear_forward(stream_, head.forward());
  ASSERT_EQ(fake_cublas_lt().matrices.size(), 1U);
  EXPECT_TRUE(wide(fake_cublas_lt().matrices[0]));
}

TEST_F(CudaProducts, RejectPaddedRowsWithBias) {
  Layer<float> layer;
  kernels::LinearForward<float> forward = layer.forward(false);
  forward.y_stride = kOut + 8;
  EXPECT_THROW(kernels_->f32_kernels()->linear_forward(stream_, forward), InvalidUsage);
  Head head(21, 20);
  EXPECT_THROW(kernels_->bf16_kernels()->linear_forward(stream_, head.forward()), InvalidUsage) << "rows overlap";
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
