// Products of 8-bit operands as the CUDA device calls cuBLASLt, on a fake of its functions that has the limits of the
// library: transposed operands, factors on the device, whole vectors, and at most one operand in E5M2.
#include <cmath>
#include <vector>

#include "tessera/base/error.h"
#include "tests/nn/ops/cuda/products_fixture.h"

namespace tessera::nn::test {
namespace {

using kernels::Fp8ProductArgs;

class Fp8ProductsTest : public ProductsTest {
 protected:
  static constexpr std::size_t kM = 5, kN = 32, kK = 48;

  template <class T>
  Fp8ProductArgs product(std::vector<T>& c, bool fast) {
    return {.a = {a_.data(), Fp8Format::e5m2, &a_descale_},
            .b = {b_.data(), Fp8Format::e4m3, &b_descale_},
            .m = kM,
            .n = kN,
            .k = kK,
            .dtype = base::dtype_of<T>,
            .c = c.data(),
            .fast = fast};
  }
  double sum(std::size_t row, std::size_t column) const {
    double total = 0;
    for (std::size_t k = 0; k < kK; ++k)
      total += static_cast<double>(decode_fp8(Fp8Format::e5m2, a_[row * kK + k])) *
               decode_fp8(Fp8Format::e4m3, b_[column * kK + k]);
    return total * a_descale_ * b_descale_;
  }
  static std::vector<std::uint8_t> codes(std::size_t count, Fp8Format format, float phase) {
    std::vector<std::uint8_t> all(count);
    for (std::size_t i = 0; i < count; ++i) all[i] = encode_fp8(format, std::sin(static_cast<float>(i) + phase));
    return all;
  }

  std::vector<std::uint8_t> a_ = codes(kM * kK, Fp8Format::e5m2, 0), b_ = codes(kN * kK, Fp8Format::e4m3, 1);
  alignas(16) float a_descale_ = 0.25F;
  alignas(16) float b_descale_ = 8;
};

TEST_F(Fp8ProductsTest, EqualSumsInDouble) {
  std::vector<base::bf16> bias(kN), c(kM * kN, base::bf16(3));
  for (std::size_t i = 0; i < kN; ++i) bias[i] = base::bf16(static_cast<float>(i) - 7);
  for (const auto& [with_bias, accumulate] : {std::pair(false, false), {true, false}, {false, true}}) {
    Fp8ProductArgs args = product(c, true);
    if (with_bias) args.bias = bias.data();
    args.accumulate = accumulate;
    const std::vector<base::bf16> before = c;
    kernels_->fp8_product(stream_, args);
    for (std::size_t row = 0; row < kM; ++row)
      for (std::size_t column = 0; column < kN; ++column) {
        const std::size_t i = row * kN + column;
        const double expected = sum(row, column) + (with_bias ? static_cast<float>(bias[column]) : 0) +
                                (accumulate ? static_cast<float>(before[i]) : 0);
        EXPECT_NEAR(static_cast<float>(c[i]), expected, std::abs(expected) / 128) << row << " " << column;
      }
  }
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 1) << "the library added the bias";
}

/// The library has no f32 bias beside 8-bit operands, so a kernel adds it.
TEST_F(Fp8ProductsTest, F32BiasIsAddedByAKernel) {
  std::vector<float> bias(kN, 2.5F), c(kM * kN);
  Fp8ProductArgs args = product(c, false);
  args.bias = bias.data();
  kernels_->fp8_product(stream_, args);
  EXPECT_EQ(fake_cublas_lt().with_epilogue, 0);
  for (std::size_t i = 0; i < c.size(); ++i) EXPECT_NEAR(c[i], sum(i / kN, i % kN) + 2.5, 1e-5);
}

TEST_F(Fp8ProductsTest, OnlyForwardProductsMayLoseBits) {
  std::vector<base::bf16> c(kM * kN);
  kernels_->fp8_product(stream_, product(c, true));
  kernels_->fp8_product(stream_, product(c, false));
  kernels_->fp8_product(stream_, product(c, true));
  ASSERT_EQ(fake_cublas_lt().matrices.size(), 3U);
  EXPECT_TRUE(fake_cublas_lt().matrices[0].fast);
  EXPECT_FALSE(fake_cublas_lt().matrices[1].fast);
  EXPECT_TRUE(fake_cublas_lt().matrices[2].fast);
  EXPECT_EQ(fake_cublas_lt().choices, 2) << "one for each kind";
}

/// A choice is made once, but factors are those of the call.
TEST_F(Fp8ProductsTest, LaterCallsHaveTheirOwnFactors) {
  std::vector<float> c(kM * kN);
  kernels_->fp8_product(stream_, product(c, false));
  const float first = c[3];
  alignas(16) float other = a_descale_ * 2;
  Fp8ProductArgs args = product(c, false);
  args.a.descale = &other;
  kernels_->fp8_product(stream_, args);
  EXPECT_EQ(c[3], 2 * first);
  EXPECT_EQ(fake_cublas_lt().choices, 1);
}

TEST_F(Fp8ProductsTest, RefuseWhatTheLibraryCannotMultiply) {
  std::vector<float> c(kM * kN);
  Fp8ProductArgs args = product(c, false);
  args.b.format = Fp8Format::e5m2;
  EXPECT_THROW(kernels_->fp8_product(stream_, args), base::InvalidUsage);
  args = product(c, false);
  const float unaligned[2] = {1, 1};
  args.a.descale = unaligned + (reinterpret_cast<std::uintptr_t>(unaligned) % 16 == 0 ? 1 : 0);
  EXPECT_THROW(kernels_->fp8_product(stream_, args), base::InvalidUsage);
  args = product(c, false);
  args.k = 40;
  EXPECT_THROW(kernels_->fp8_product(stream_, args), base::InvalidUsage);
  fake_cublas_lt().no_algorithms = true;
  EXPECT_THROW(kernels_->fp8_product(stream_, product(c, false)), base::Unsupported);
}

/// The test's device has no compute capability.
TEST_F(Fp8ProductsTest, OldDevicesSayWhatToDo) {
  const std::string reason = kernels_->fp8_reason();
  EXPECT_NE(reason.find("need 8.9 or newer"), std::string::npos) << reason;
  EXPECT_NE(reason.find("use bf16"), std::string::npos) << reason;
}

}  // namespace
}  // namespace tessera::nn::test
