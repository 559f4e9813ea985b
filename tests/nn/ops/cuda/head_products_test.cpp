// How the CUDA device calls cuBLASLt for a language-model head, whose rows of logits are padded.
#include <algorithm>
#include <cmath>
#include <vector>

#include "tessera/base/error.h"
#include "tests/nn/ops/cuda/products_fixture.h"

namespace tessera::nn::test {
namespace {

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

using HeadProducts = ProductsTest;

TEST_F(HeadProducts, PaddedRowsOfLogitsMakeWideProducts) {
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

TEST_F(HeadProducts, DetectsPackedRowsOfLogits) {
  Head head(21, 21);
  kernels_->bf16_kernels()->linear_forward(stream_, head.forward());
  kernels_->bf16_kernels()->linear_backward(stream_, head.backward(false));
  ASSERT_EQ(fake_cublas_lt().matrices.size(), 3U);
  for (const FakeProduct& product : fake_cublas_lt().matrices) EXPECT_FALSE(wide(product));
}

TEST_F(HeadProducts, ColumnsThatFitAreOneProduct) {
  Head head(24, 32);
  kernels_->bf16_kernels()->linear_forward(stream_, head.forward());
  ASSERT_EQ(fake_cublas_lt().matrices.size(), 1U);
  EXPECT_TRUE(wide(fake_cublas_lt().matrices[0]));
}

TEST_F(HeadProducts, RejectRowsThatOverlap) {
  Head head(21, 20);
  EXPECT_THROW(kernels_->bf16_kernels()->linear_forward(stream_, head.forward()), InvalidUsage);
}

}  // namespace
}  // namespace tessera::nn::test
