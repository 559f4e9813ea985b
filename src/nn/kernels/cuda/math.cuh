// exp, the logistic function and the normal distribution, with the operations of kernels/cpu/math-inl.h in the same
// order, so the bits equal those of the host's vector code; for elements of 16 bits also by approximate instructions.
#pragma once

#include "tessera/nn/kernels/cuda/portable.cuh"

namespace tessera::nn::cuda {

/// c[0] x^(n-1) + ... + c[n-1], by Horner's rule with fused multiply-adds.
template <class W, std::size_t n>
TESSERA_DEVICE W polynomial(W x, const double (&c)[n]) {
  W sum = static_cast<W>(c[0]);
  TESSERA_UNROLL
  for (std::size_t i = 1; i < n; ++i) sum = fused(sum, x, static_cast<W>(c[i]));
  return sum;
}

TESSERA_DEVICE float exponential(float x) {
  constexpr double kPolynomial[] = {1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
                                    4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1};
  const float below = x < 88.3F ? x : (x >= 88.3F ? 88.3F : x);  // preserves NaN
  const float clamped = below < -87.3F ? -87.3F : below;
  const float shifted = fused(clamped, 1.44269504088896340736F, 12582912.0F);
  const float n = shifted - 12582912.0F;
  float r = fused(-n, 0.693359375F, clamped);
  r = fused(-n, -2.12194440e-4F, r);
  const float e = fused(r * r, polynomial(r, kPolynomial), r) + 1.0F;
  const float result = bits_as<float>(bits_as<std::uint32_t>(e) + (bits_as<std::uint32_t>(shifted) << 23));
  // The last sum would turn a device's NaN, 0x7fffffff, into a number.
  return x < -87.3F ? 0.0F : (x == x ? result : x);
}

TESSERA_DEVICE double exponential(double x) {
  constexpr double kPolynomial[] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0,
                                    1.0 / 362880.0,     1.0 / 40320.0,     1.0 / 5040.0,     1.0 / 720.0,
                                    1.0 / 120.0,        1.0 / 24.0,        1.0 / 6.0,        0.5};
  const double below = x >= 709.0 ? 709.0 : x;
  const double clamped = below < -708.3 ? -708.3 : below;
  const double shifted = fused(clamped, 1.44269504088896340736, 6755399441055744.0);
  const double n = shifted - 6755399441055744.0;
  double r = fused(-n, 6.93147180369123816490e-01, clamped);
  r = fused(-n, 1.90821492927058770002e-10, r);
  const double e = fused(r * r, polynomial(r, kPolynomial), r) + 1.0;
  const double result = bits_as<double>(bits_as<std::uint64_t>(e) + (bits_as<std::uint64_t>(shifted) << 52));
  return x < -708.3 ? 0.0 : (x == x ? result : x);
}

inline constexpr float kLog2E = 1.44269504088896340736F;

/// 2^x with a relative error of at most 2^-22, and 0 below 2^-126: one instruction. For kernels of half-precision
/// elements, which round the result to 2^-9 or 2^-12 of itself.
TESSERA_DEVICE float fast_exp2(float x) {
#if defined(__CUDACC__)
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return emulation::fast_exp2(x);
#endif
}

/// 1 / x with a relative error of at most 2^-22: one instruction. For such kernels as well.
TESSERA_DEVICE float fast_reciprocal(float x) {
#if defined(__CUDACC__)
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#else
  return emulation::fast_reciprocal(x);
#endif
}

/// 1 / (1 + exp(-x)) for elements of type T. Elements of 16 bits would not show the last bits of f32, which cost a
/// polynomial and a division of a dozen instructions each.
template <class T>
TESSERA_DEVICE OpMath<T> logistic(OpMath<T> x) {
  if constexpr (sizeof(T) == 2) return fast_reciprocal(1.0F + fast_exp2(x * -kLog2E));
  return OpMath<T>(1) / (OpMath<T>(1) + exponential(-x));
}

/// The standard normal distribution: `density` phi(x) and `below` Phi(x).
template <class W>
struct NormalDistribution {
  W density;
  W below;
};

/// W. J. Cody's rational functions for the error function (Math. Comp. 23, 1969), on three ranges of |x| / sqrt(2).
template <class W>
TESSERA_DEVICE NormalDistribution<W> normal_distribution(W x) {
  constexpr double kA[] = {1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
                           3.20937758913846947e3};
  constexpr double kB[] = {1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
                           2.84423683343917062e3};
  constexpr double kC[] = {2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0,
                           6.61191906371416295e1,  2.98635138197400131e2,  8.81952221241769090e2,
                           1.71204761263407058e3,  2.05107837782607147e3,  1.23033935479799725e3};
  constexpr double kD[] = {1.0,
                           1.57449261107098347e1,
                           1.17693950891312499e2,
                           5.37181101862009858e2,
                           1.62138957456669019e3,
                           3.29079923573346963e3,
                           4.36261909014324716e3,
                           3.43936767414372164e3,
                           1.23033935480374942e3};
  constexpr double kP[] = {1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1,
                           1.25781726111229246e-1, 1.60837851487422766e-2, 6.58749161529837803e-4};
  constexpr double kQ[] = {1.0,
                           2.56852019228982242e0,
                           1.87295284992346725e0,
                           5.27905102951428412e-1,
                           6.05183413124413191e-2,
                           2.33520497626869185e-3};
  const W z = x * static_cast<W>(0.70710678118654752440);
  const W y = smaller(static_cast<W>(sizeof(W) == 4 ? 20 : 40), z < 0 ? -z : z);
  const W gauss = exponential(x * x * static_cast<W>(-0.5));
  const W density = gauss * static_cast<W>(0.39894228040143267794);
  if (y < static_cast<W>(0.46875)) {
    const W square = smaller(W(1), z * z);
    const W small = z * (polynomial(square, kA) / polynomial(square, kB));
    return {density, fused(W(0.5), small, W(0.5))};
  }
  W scaled;
  if (y > W(4)) {
    const W inverse = W(1) / (y * y);
    const W ratio = inverse * (polynomial(inverse, kP) / polynomial(inverse, kQ));
    scaled = (static_cast<W>(0.56418958354775628695) - ratio) / y;
  } else {
    scaled = polynomial(y, kC) / polynomial(y, kD);
  }
  const W tail = W(0.5) * (gauss * scaled);
  return {density, x < 0 ? tail : W(1) - tail};
}

}  // namespace tessera::nn::cuda
