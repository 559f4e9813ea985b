// Shared by the kernel tests: reproducible inputs, central differences in double, and bitwise comparisons.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <vector>

#include "tessera/nn/random.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels::test {

template <class T>
std::vector<T> random_vector(std::size_t count, std::uint64_t seed, double std = 1) {
  std::vector<T> out(count);
  fill_normal({.name = "test", .seed = seed, .end = count}, T(0), static_cast<T>(std), out.data());
  return out;
}

template <class To, class From>
std::vector<To> cast(const std::vector<From>& in) {
  return std::vector<To>(in.begin(), in.end());
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/// Largest |a - b| relative to the largest |b|.
template <class A, class B>
double relative_difference(const std::vector<A>& a, const std::vector<B>& b) {
  double difference = 0, largest = 1e-30;
  for (std::size_t i = 0; i < b.size(); ++i) {
    const double x = static_cast<double>(a[i]), y = static_cast<double>(b[i]);
    if (std::isnan(x) || std::isnan(y)) return INFINITY;
    difference = std::max(difference, std::abs(x - y));
    largest = std::max(largest, std::abs(y));
  }
  return difference / largest;
}

/// The gradient of loss() with respect to x by central differences.
inline std::vector<double> differences(std::vector<double>& x, const std::function<double()>& loss,
                                       double step = 1e-5) {
  std::vector<double> gradient(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double old = x[i];
    x[i] = old + step;
    const double above = loss();
    x[i] = old - step;
    const double below = loss();
    x[i] = old;
    gradient[i] = (above - below) / (2 * step);
  }
  return gradient;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

/// The result of a backward that adds to `start`.
template <class T>
std::vector<T> plus(const std::vector<T>& start, const std::vector<T>& gradient) {
  std::vector<T> sum = start;
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradient[i];
  return sum;
}

struct AlignedFree {
  void operator()(void* p) const { std::free(p); }
};
/// Scratch of exactly the stated size (rounded up to 64), filled with NaN.
inline std::unique_ptr<void, AlignedFree> scratch(std::size_t bytes) {
  const std::size_t size = (bytes + 63) / 64 * 64;
  void* p = std::aligned_alloc(64, size);
  if (!p) throw std::bad_alloc();
  std::memset(p, 0xff, size);
  return std::unique_ptr<void, AlignedFree>(p);
}

constexpr double kGradientTolerance = 2e-7;  // of central differences with a step of 1e-5 in f64

}  // namespace tessera::nn::kernels::test
