// exp, the logistic function and the normal distribution on vectors of f32 or f64.
#if defined(TESSERA_NN_KERNELS_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_NN_KERNELS_MATH_INL_H_
#undef TESSERA_NN_KERNELS_MATH_INL_H_
#else
#define TESSERA_NN_KERNELS_MATH_INL_H_
#endif

#include <cstdint>

#include "tessera/nn/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {

/// c[0] x^(n-1) + ... + c[n-1], by Horner's rule with fused multiply-adds.
template <class T, std::size_t n>
HWY_INLINE Vec<T> polynomial(Vec<T> x, const double (&c)[n]) {
  Vec<T> sum = set<T>(c[0]);
  for (std::size_t i = 1; i < n; ++i) sum = mul_add<T>(sum, x, set<T>(c[i]));
  return sum;
}

template <class T>
struct ExpConstants;
template <>
struct ExpConstants<float> {
  using Bits = std::int32_t;
  static constexpr int kMantissa = 23;
  static constexpr double kMagic = 12582912.0;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  static constexpr double kLow = -87.3, kHigh = 88.3;
  static constexpr double kLn2High = 0.693359375, kLn2Low = -2.12194440e-4;
  // exp(r) = 1 + r + r^2 p(r) on |r| <= ln(2)/2: S. Moshier's Cephes, expf.
  static constexpr double kPolynomial[] = {1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
                                           4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1};
};
template <>
struct ExpConstants<double> {
  using Bits = std::int64_t;
  static constexpr int kMantissa = 52;
  static constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kLow = -708.3, kHigh = 709.0;
  static constexpr double kLn2High = 6.93147180369123816490e-01, kLn2Low = 1.90821492927058770002e-10;
  // The Taylor series: 1/13! .. 1/2!
  static constexpr double kPolynomial[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                           1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                           1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5};
};

/// exp(x) to about 1 ulp. 0 below kLow (no subnormals), exp(kHigh) above kHigh; NaN stays NaN.
template <class T>
HWY_INLINE Vec<T> exp(Vec<T> x) {
  using Constants = ExpConstants<T>;
  const hn::Rebind<typename Constants::Bits, Tag<T>> bits;
  const auto too_low = hn::Lt(x, set<T>(Constants::kLow));
  const Vec<T> clamped = max_of<T>(set<T>(Constants::kLow), min_of<T>(set<T>(Constants::kHigh), x));  // NaN if x is
  const Vec<T> shifted = mul_add<T>(clamped, set<T>(1.44269504088896340736), set<T>(Constants::kMagic));
  const Vec<T> n = hn::Sub(shifted, set<T>(Constants::kMagic));
  Vec<T> r = neg_mul_add<T>(n, set<T>(Constants::kLn2High), clamped);
  r = neg_mul_add<T>(n, set<T>(Constants::kLn2Low), r);
  const Vec<T> p = polynomial<T>(r, Constants::kPolynomial);
  const Vec<T> e = hn::Add(mul_add<T>(hn::Mul(r, r), p, r), set<T>(1));
  const auto exponent = hn::ShiftLeft<Constants::kMantissa>(hn::BitCast(bits, shifted));
  const Vec<T> result = hn::BitCast(Tag<T>(), hn::Add(hn::BitCast(bits, e), exponent));
  return hn::IfThenZeroElse(too_low, result);
}

/// 1 / (1 + exp(-x))
template <class T>
HWY_INLINE Vec<T> sigmoid(Vec<T> x) {
  return hn::Div(set<T>(1), hn::Add(set<T>(1), exp<T>(hn::Neg(x))));
}

/// The standard normal distribution: `density` phi(x) and `below` Phi(x).
template <class T>
struct Normal {
  Vec<T> density;
  Vec<T> below;
};

/// W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23 (1969): three ranges of y =
/// |x| / sqrt(2). Computes all three and selects one.
template <class T>
HWY_INLINE Normal<T> normal(Vec<T> x) {
  static constexpr double kA[] = {1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2,
                                  3.77485237685302021e2, 3.20937758913846947e3};
  static constexpr double kB[] = {1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
                                  2.84423683343917062e3};
  static constexpr double kC[] = {2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0,
                                  6.61191906371416295e1,  2.98635138197400131e2,  8.81952221241769090e2,
                                  1.71204761263407058e3,  2.05107837782607147e3,  1.23033935479799725e3};
  static constexpr double kD[] = {1.0,
                                  1.57449261107098347e1,
                                  1.17693950891312499e2,
                                  5.37181101862009858e2,
                                  1.62138957456669019e3,
                                  3.29079923573346963e3,
                                  4.36261909014324716e3,
                                  3.43936767414372164e3,
                                  1.23033935480374942e3};
  static constexpr double kP[] = {1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
                                  1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4};
  static constexpr double kQ[] = {1.0,
                                  2.56852019228982242e0,
                                  1.87295284992346725e0,
                                  5.27905102951428412e-1,
                                  6.05183413124413191e-2,
                                  2.33520497626869185e-3};
  const Vec<T> one = set<T>(1);
  const Vec<T> half = set<T>(0.5);
  const Vec<T> z = hn::Mul(x, set<T>(0.70710678118654752440));
  // Beyond 20 (f64: 40) the tails are exactly 0 and 1; the bound keeps the polynomials finite.
  const Vec<T> y = hn::Min(set<T>(sizeof(T) == 4 ? 20 : 40), hn::Abs(z));
  const Vec<T> square = hn::Mul(z, z);
  const Vec<T> gauss = exp<T>(hn::Mul(hn::Mul(x, x), set<T>(-0.5)));
  const Vec<T> small =
      hn::Mul(z, hn::Div(polynomial<T>(hn::Min(one, square), kA), polynomial<T>(hn::Min(one, square), kB)));
  const Vec<T> middle = hn::Div(polynomial<T>(y, kC), polynomial<T>(y, kD));
  const Vec<T> safe = hn::Max(one, y);
  const Vec<T> inverse = hn::Div(one, hn::Mul(safe, safe));
  const Vec<T> ratio = hn::Mul(inverse, hn::Div(polynomial<T>(inverse, kP), polynomial<T>(inverse, kQ)));
  const Vec<T> large = hn::Div(hn::Sub(set<T>(0.56418958354775628695), ratio), safe);
  const Vec<T> tail = hn::Mul(half, hn::Mul(gauss, hn::IfThenElse(hn::Gt(y, set<T>(4)), large, middle)));
  const Vec<T> outer = hn::IfThenElse(hn::Lt(x, hn::Zero(Tag<T>())), tail, hn::Sub(one, tail));
  const Vec<T> inner = mul_add<T>(half, small, half);
  return {hn::Mul(gauss, set<T>(0.39894228040143267794)), hn::IfThenElse(hn::Lt(y, set<T>(0.46875)), inner, outer)};
}

}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
