// Casts on the tape: values and gradients are rounded once, and a cast without effect does nothing.
#include "tessera/nn/ops/cast.h"

#include <gmock/gmock.h>

#include "tessera/nn/ops/arithmetic.h"
#include "tests/nn/ops/finite_differences.h"
#include "tests/nn/temporary_directory.h"

namespace tessera::nn::test {
namespace {

using testing::HasSubstr;

constexpr std::size_t kCount = 1000;

template <class T>
std::vector<double> rounded(const std::vector<double>& values) {
  std::vector<double> out;
  for (const double value : values)
    out.push_back(static_cast<double>(static_cast<float>(T(static_cast<float>(value)))));
  return out;
}

/// A leaf with values that f32 represents exactly, and the weights of weighted_sum() in f32.
struct Given {
  Context context;
  Tensor x = leaf(context, {10, 100}, "x", DType::f32);
  std::vector<double> values() const { return {x.data<float>(), x.data<float>() + kCount}; }
  static std::vector<double> weights() {
    std::vector<double> weights(kCount);
    fill_normal({"loss weights", 3, 0, kCount}, 0.0, 1.0, weights.data());
    return rounded<float>(weights);
  }
  std::vector<double> gradient() const {
    const Tensor g = x.gradient()->value();
    EXPECT_EQ(g.dtype(), DType::f32);
    return {g.data<float>(), g.data<float>() + kCount};
  }
  void run(const std::function<Tensor(const Tensor&)>& function) {
    x.gradient()->clear();
    Tape tape;
    const TapeScope scope(context, &tape);
    tape.backward(weighted_sum(function(x)));
  }
};

class Casts : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(Types, Casts, testing::Values(DType::bf16, DType::f16),
                         [](const auto& test) { return std::string(name_of(test.param)); });

TEST_P(Casts, RoundValuesAndGradientsOnce) {
  Given given;
  const DType dtype = GetParam();
  const auto expected = [&](const std::vector<double>& of) {
    return dtype == DType::bf16 ? rounded<bf16>(of) : rounded<f16>(of);
  };
  Tensor y;
  given.run([&](const Tensor& x) { return y = ops::cast(ops::cast(x, dtype), DType::f32); });
  EXPECT_EQ(std::vector<double>(y.data<float>(), y.data<float>() + kCount), expected(given.values()));
  EXPECT_EQ(given.gradient(), expected(Given::weights()));
  EXPECT_NE(given.gradient(), Given::weights()) << "the control: a gradient that was never cast";
  // In double, the derivative with respect to the rounded value is the upstream gradient itself.
  const std::vector<double> exact = Given::weights(), got = given.gradient();
  const double most = dtype == DType::bf16 ? 0x1p-8 : 0x1p-11;
  for (std::size_t i = 0; i < kCount; ++i) EXPECT_NEAR(got[i], exact[i], most * std::abs(exact[i]));
}

TEST_P(Casts, AccumulateGradients) {
  Given given;
  given.run(
      [&](const Tensor& x) { return ops::add(ops::scale(x, 2), ops::cast(ops::cast(x, GetParam()), DType::f32)); });
  const std::vector<double> both = given.gradient();
  given.run([&](const Tensor& x) { return ops::cast(ops::cast(x, GetParam()), DType::f32); });
  const std::vector<double> one = given.gradient(), weights = Given::weights();
  for (std::size_t i = 0; i < kCount; ++i)
    EXPECT_EQ(both[i], static_cast<double>(static_cast<float>(2 * weights[i] + one[i])));
}

TEST_P(Casts, AreTrackedAndReleased) {
  Given given;
  const auto now = [&] { return given.context.memory_tracker().snapshot().now_of(MemoryCategory::activation); };
  const std::uint64_t before = now();
  {
    const Tensor y = ops::cast(given.x, GetParam());
    EXPECT_EQ(now() - before, 2 * kCount);
  }
  EXPECT_EQ(now(), before);
}

TEST(Cast, ToSameDtypeIsIdentity) {
  Given given;
  Tape tape;
  const TapeScope scope(given.context, &tape);
  const auto before = given.context.memory_tracker().snapshot().now_of(MemoryCategory::activation);
  const Tensor y = ops::cast(given.x, DType::f32);
  EXPECT_EQ(y.raw(), given.x.raw());
  EXPECT_EQ(y.gradient(), given.x.gradient());
  EXPECT_EQ(tape.size(), 0U);
  EXPECT_EQ(given.context.memory_tracker().snapshot().now_of(MemoryCategory::activation), before);
  const Tensor other = ops::cast(given.x, DType::bf16);
  EXPECT_EQ(tape.size(), 1U) << "the control";
}

TEST(Cast, WithoutGradientIsNotRecorded) {
  Given given;
  Tape tape;
  const TapeScope scope(given.context, &tape);
  EXPECT_FALSE(ops::cast(given.x.detached(), DType::bf16).requires_grad());
  EXPECT_EQ(tape.size(), 0U);
}

TEST(Cast, ConvertsBetweenHalfPrecisionDtypes) {
  Given given;
  const Tensor y = ops::cast(ops::cast(ops::cast(given.x, DType::f16), DType::bf16), DType::f16);
  EXPECT_EQ(y.dtype(), DType::f16);
  const std::vector<double> expected = rounded<bf16>(rounded<f16>(given.values()));
  for (std::size_t i = 0; i < kCount; ++i)
    ASSERT_EQ(static_cast<double>(static_cast<float>(y.data<f16>()[i])), expected[i]);
}

TEST(Cast, RejectsOtherDtypes) {
  Given given;
  EXPECT_THAT(error_of<Unsupported>([&] { ops::cast(given.x, DType::f64); }), HasSubstr("cast: no kernel for f64"));
  EXPECT_THAT(error_of<Unsupported>([&] { ops::cast(ids(given.context, {1}, {1}), DType::f32); }), HasSubstr("i32"));
}

TEST(Cast, OnMetaHasShapeAndBytes) {
  Context context({.device = {DeviceType::meta, 0}});
  const Tensor y = ops::cast(Tensor::empty(context, {3, 5}, DType::f32), DType::bf16);
  EXPECT_EQ(y.shape(), (Shape{3, 5}));
  EXPECT_EQ(y.dtype(), DType::bf16);
}

}  // namespace
}  // namespace tessera::nn::test
