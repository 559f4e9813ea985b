#include "tessera/nn/kernels/elementwise.h"

#include "tessera/nn/kernels/activation.h"
#include "tests/nn/kernels/support.h"

namespace tessera::nn::kernels {
namespace {
using namespace test;

constexpr std::size_t kCounts[] = {1, 5, 7, 13, 33, 257};
const Activation kActivations[] = {Activation::relu, Activation::gelu_tanh, Activation::gelu_erf, Activation::silu};

double reference(Activation kind, double x) {
  switch (kind) {
    case Activation::relu:
      return x > 0 ? x : 0;
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::silu:
      return x / (1 + std::exp(-x));
  }
  return NAN;
}

TEST(Activation, ForwardEqualsLibrary) {
  ThreadPool pool;
  std::vector<double> x;
  for (int i = -1200; i <= 1200; ++i) x.push_back(i * 0.01);
  for (const double far : {-50.0, -30.0, 30.0, 50.0}) x.push_back(far);
  const std::vector<float> xf = cast<float>(x);
  std::vector<double> y(x.size());
  std::vector<float> yf(x.size());
  for (const Activation kind : kActivations) {
    activation_forward(pool, kind, x.data(), y.data(), x.size());
    activation_forward(pool, kind, xf.data(), yf.data(), x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
      EXPECT_NEAR(y[i], reference(kind, x[i]), 4e-15 * std::max(1.0, std::abs(x[i])))
          << static_cast<int>(kind) << " " << x[i];
      const double xi = static_cast<double>(xf[i]);
      EXPECT_NEAR(yf[i], reference(kind, xi), 3e-7 * std::max(1.0, std::abs(xi)))
          << static_cast<int>(kind) << " " << xi;
    }
  }
}

TEST(Activation, GradientsEqualFiniteDifferences) {
  ThreadPool pool;
  for (const Activation kind : kActivations)
    for (const std::size_t n : kCounts) {
      std::vector<double> x = random_vector<double>(n, n, 2), dy = random_vector<double>(n, n + 1), y(n), dx(n, NAN);
      const auto expected = differences(x, [&] {
        activation_forward(pool, kind, x.data(), y.data(), n);
        return dot(y, dy);
      });
      activation_backward<double>(pool, kind, {x.data(), dy.data(), dx.data(), n, false});
      EXPECT_LT(relative_difference(dx, expected), kGradientTolerance) << static_cast<int>(kind) << " " << n;
      std::vector<double> more = random_vector<double>(n, 5);
      const std::vector<double> sum = plus(more, dx);
      activation_backward<double>(pool, kind, {x.data(), dy.data(), more.data(), n, true});
      EXPECT_LT(relative_difference(more, sum), 1e-15);
      std::vector<float> dxf(n), xf = cast<float>(x), dyf = cast<float>(dy);
      activation_backward<float>(pool, kind, {xf.data(), dyf.data(), dxf.data(), n, false});
      EXPECT_LT(relative_difference(dxf, dx), 2e-6);
    }
}

TEST(Swiglu, GradientsEqualFiniteDifferences) {
  ThreadPool pool;
  for (const std::size_t n : kCounts) {
    std::vector<double> gate = random_vector<double>(n, 1, 2), up = random_vector<double>(n, 2),
                        dy = random_vector<double>(n, 3);
    std::vector<double> y(n), dgate(n, NAN), dup(n, NAN);
    const auto loss = [&] {
      swiglu_forward(pool, gate.data(), up.data(), y.data(), n);
      return dot(y, dy);
    };
    const auto expected_gate = differences(gate, loss), expected_up = differences(up, loss);
    SwigluBackward<double> args{gate.data(), up.data(), dy.data(), dgate.data(), dup.data(), n, false, false};
    swiglu_backward(pool, args);
    EXPECT_LT(relative_difference(dgate, expected_gate), kGradientTolerance);
    EXPECT_LT(relative_difference(dup, expected_up), kGradientTolerance);
    std::vector<double> more(n, 3.0);
    args.dup = nullptr;
    args.dgate = more.data();
    args.accumulate_dgate = true;
    swiglu_backward(pool, args);
    EXPECT_LT(relative_difference(more, plus(std::vector<double>(n, 3.0), dgate)), 1e-15);
    // In place of the inputs.
    std::vector<double> g = gate, u = up;
    swiglu_backward<double>(pool, {g.data(), u.data(), dy.data(), g.data(), u.data(), n, false, false});
    EXPECT_TRUE(same_bits(g, dgate) && same_bits(u, dup));
  }
}

/// Whether `kernel(x, y, n)` gives the same bits for a whole range and for the range split anywhere, unaligned and with
/// tails.
template <class T, class Kernel>
bool placeless(Kernel kernel) {
  const std::size_t n = 199;
  const std::vector<T> x = random_vector<T>(n, 11, 2);
  std::vector<T> whole(n);
  kernel(x.data(), whole.data(), n);
  for (const std::size_t split_at : {1u, 2u, 3u, 8u, 15u, 64u, 100u, 198u}) {
    std::vector<T> parts(n), shifted(n + split_at);
    kernel(x.data(), parts.data(), split_at);
    kernel(x.data() + split_at, parts.data() + split_at, n - split_at);
    kernel(x.data(), shifted.data() + split_at, n);
    shifted.erase(shifted.begin(), shifted.begin() + static_cast<long>(split_at));
    if (!same_bits(parts, whole) || !same_bits(shifted, whole)) return false;
  }
  return true;
}

template <class T>
void expect_all_placeless() {
  ThreadPool pool;
  for (const Activation kind : kActivations) {
    EXPECT_TRUE(placeless<T>([&](const T* x, T* y, std::size_t n) { activation_forward(pool, kind, x, y, n); }))
        << "forward";
    EXPECT_TRUE(placeless<T>([&](const T* x, T* y, std::size_t n) {
      activation_backward<T>(pool, kind, {x, x, y, n, false});
    })) << "backward";
  }
  EXPECT_TRUE(placeless<T>([&](const T* x, T* y, std::size_t n) { swiglu_forward(pool, x, x, y, n); })) << "swiglu";
  EXPECT_TRUE(placeless<T>([&](const T* x, T* y, std::size_t n) { add(pool, x, x, y, n); })) << "add";
  EXPECT_TRUE(placeless<T>([&](const T* x, T* y, std::size_t n) {
    scale<T>(pool, {x, T(0.3), y, n, false});
  })) << "scale";
}
TEST(Elementwise, BitsOfElementAreIndependentOfPosition) {
  expect_all_placeless<float>();
  expect_all_placeless<double>();
}
// The control: a kernel that treats the last elements of its range differently is detected.
TEST(Elementwise, DetectsDifferenceByPosition) {
  EXPECT_FALSE(placeless<float>([](const float* x, float* y, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) y[i] = i < n / 8 * 8 ? std::fma(x[i], x[i], x[i]) : x[i] * x[i] + x[i];
  }));
}

TEST(Elementwise, SimpleOnes) {
  for (const std::size_t threads : {1, 2, 3}) {
    ThreadPool pool(threads);
    const std::size_t n = 40001;
    const std::vector<float> a = random_vector<float>(n, 1), b = random_vector<float>(n, 2);
    std::vector<float> y(n), z(n, 2.0f), w(n, 1.0f);
    add(pool, a.data(), b.data(), y.data(), n);
    assign(pool, a.data(), z.data(), n, true);
    for (std::size_t i = 0; i < n; ++i) {
      ASSERT_EQ(y[i], a[i] + b[i]);
      ASSERT_EQ(z[i], 2.0f + a[i]);
    }
    scale<float>(pool, {a.data(), 0.5f, w.data(), n, false});
    assign(pool, b.data(), z.data(), n, false);
    for (std::size_t i = 0; i < n; ++i) ASSERT_TRUE(w[i] == 0.5f * a[i] && z[i] == b[i]);
    fill(pool, 7.0f, w.data(), n);
    EXPECT_EQ(w, std::vector<float>(n, 7.0f));
  }
}

TEST(Elementwise, RowsAndColumns) {
  ThreadPool pool(2);
  for (const std::size_t columns : {5u, 7u, 33u, 130u}) {
    const std::size_t rows = 131;
    const auto x = random_vector<double>(rows * columns, 1), bias = random_vector<double>(columns, 2);
    std::vector<double> y = x, sums(columns, 9.0), more(columns, 9.0), spread(rows * columns);
    add_bias(pool, bias.data(), y.data(), rows, columns);
    broadcast_rows(pool, bias.data(), spread.data(), rows, columns);
    column_sums<double>(pool, {x.data(), sums.data(), rows, columns, false});
    column_sums<double>(pool, {x.data(), more.data(), rows, columns, true});
    for (std::size_t c = 0; c < columns; ++c) {
      double sum = 0;
      for (std::size_t r = 0; r < rows; ++r) {
        EXPECT_EQ(y[r * columns + c], x[r * columns + c] + bias[c]);
        EXPECT_EQ(spread[r * columns + c], bias[c]);
        sum += x[r * columns + c];
      }
      EXPECT_NEAR(sums[c], sum, 1e-12);
      EXPECT_NEAR(more[c], sum + 9, 1e-12);
    }
  }
}

TEST(Elementwise, SumsAreExactEnoughAndIndependentOfThreads) {
  const std::size_t n = 100003;
  const std::vector<float> x = random_vector<float>(n, 4);
  const std::vector<double> xd = cast<double>(x);
  long double powers[4] = {};
  for (const float v : x) {
    const long double m = std::abs(static_cast<long double>(v));
    powers[0] += m;
    powers[1] += m * m;
    powers[2] += m * m * m;
    powers[3] = std::max(powers[3], m);
  }
  ThreadPool one(1);
  for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity}) {
    const double part = norm_part(one, norm, x.data(), n);
    const auto expected = static_cast<double>(powers[static_cast<int>(norm)]);
    EXPECT_NEAR(part, expected, 1e-13 * expected);
    EXPECT_EQ(norm_part(one, norm, xd.data(), n), part);
    for (const std::size_t threads : {2, 3}) {
      ThreadPool pool(threads);
      EXPECT_EQ(norm_part(pool, norm, x.data(), n), part);
    }
  }
}

TEST(Elementwise, NonFiniteValueReachesEveryNorm) {
  ThreadPool pool(2);
  for (const float bad : {NAN, INFINITY, -INFINITY})
    for (const std::size_t at : {0U, 7U, 70001U})
      for (const Norm norm : {Norm::one, Norm::two, Norm::three, Norm::infinity}) {
        std::vector<float> x(100003, 1.0F);
        EXPECT_TRUE(std::isfinite(norm_part(pool, norm, x.data(), x.size())));
        x[at] = bad;
        const double part = norm_part(pool, norm, x.data(), x.size());
        EXPECT_EQ(std::isnan(part), std::isnan(bad));
        EXPECT_FALSE(std::isfinite(part));
      }
}

TEST(Convert, SixteenBits) {
  ThreadPool pool(2);
  const std::size_t n = 20011;
  const std::vector<float> x = random_vector<float>(n, 1, 100);
  std::vector<base::f16> f16_values(n);
  std::vector<base::bf16> bf16_values(n);
  std::vector<float> from_f16(n), from_bf16(n);
  convert(pool, {x.data(), base::DType::f32, f16_values.data(), base::DType::f16, n});
  convert(pool, {x.data(), base::DType::f32, bf16_values.data(), base::DType::bf16, n});
  convert(pool, {f16_values.data(), base::DType::f16, from_f16.data(), base::DType::f32, n});
  convert(pool, {bf16_values.data(), base::DType::bf16, from_bf16.data(), base::DType::f32, n});
  for (std::size_t i = 0; i < n; ++i) {
    ASSERT_EQ(f16_values[i].bits, base::f16(x[i]).bits);
    ASSERT_EQ(bf16_values[i].bits, base::bf16(x[i]).bits);
    ASSERT_EQ(from_f16[i], static_cast<float>(f16_values[i]));
    ASSERT_EQ(from_bf16[i], static_cast<float>(bf16_values[i]));
  }
}

}  // namespace
}  // namespace tessera::nn::kernels
