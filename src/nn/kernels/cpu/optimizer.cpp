// Optimizer steps, and the partial norms of the gradients that they clip (norm_part of elementwise.h).
#include "tessera/nn/kernels/optimizer.h"

#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/elementwise.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/optimizer.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_OPTIMIZER_ONCE
#define TESSERA_NN_KERNELS_OPTIMIZER_ONCE
namespace tessera::nn::kernels {
template <class T>
struct OptimizerTable {
  void (*sgd)(const SgdStep<T>&);
  void (*adam)(const AdamStep<T>&);
  std::array<double (*)(const T*, std::size_t), 4> norms;  // indexed by Norm
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

template <class T>
void sgd(const SgdStep<T>& a) {
  const Vec<T> scale = set<T>(a.maximize ? -a.grad_scale : a.grad_scale);
  const Vec<T> decay = set<T>(a.weight_decay), momentum = set<T>(a.momentum), rate = set<T>(a.learning_rate);
  for_slots<T>(a.count, [&](Slot<T> slot) HWY_ATTR {
    const Vec<T> p = slot.read(a.parameter);
    Vec<T> g = mul_add<T>(decay, p, hn::Mul(scale, slot.read(a.gradient)));
    if (a.momentum_buffer) {
      const Vec<T> buffer = a.first_step ? g : mul_add<T>(momentum, slot.read(a.momentum_buffer), g);
      slot.write(buffer, a.momentum_buffer);
      g = a.nesterov ? mul_add<T>(momentum, buffer, g) : buffer;
    }
    slot.write(neg_mul_add<T>(rate, g, p), a.parameter);
  });
}

template <class T>
void adam(const AdamStep<T>& a) {
  const double correction1 = 1 - base::portable::power(a.beta1, a.step);
  const double correction2 = std::sqrt(1 - base::portable::power(a.beta2, a.step));
  const Vec<T> scale = set<T>(a.maximize ? -a.grad_scale : a.grad_scale);
  const Vec<T> coupled = set<T>(a.decoupled ? 0 : a.weight_decay);
  const Vec<T> kept = set<T>(a.decoupled ? 1 - a.learning_rate * a.weight_decay : 1);
  const Vec<T> rest1 = set<T>(1 - a.beta1), beta2 = set<T>(a.beta2), rest2 = set<T>(1 - a.beta2);
  const Vec<T> rate = set<T>(a.learning_rate / correction1), root2 = set<T>(1 / correction2), eps = set<T>(a.eps);
  for_slots<T>(a.count, [&](Slot<T> slot) HWY_ATTR {
    const Vec<T> p = slot.read(a.parameter);
    const Vec<T> g = mul_add<T>(coupled, p, hn::Mul(scale, slot.read(a.gradient)));
    const Vec<T> m_old = slot.read(a.first_moment);
    const Vec<T> m = mul_add<T>(rest1, hn::Sub(g, m_old), m_old);
    Vec<T> v = mul_add<T>(hn::Mul(rest2, g), g, hn::Mul(beta2, slot.read(a.second_moment)));
    slot.write(m, a.first_moment);
    slot.write(v, a.second_moment);
    if (a.max_second_moment) {
      v = max_of<T>(slot.read(a.max_second_moment), v);
      slot.write(v, a.max_second_moment);
    }
    const Vec<T> denominator = mul_add<T>(hn::Sqrt(v), root2, eps);
    slot.write(neg_mul_add<T>(rate, hn::Div(m, denominator), hn::Mul(kept, p)), a.parameter);
  });
}

/// Calls step(...) for f64 copies of x, in as many lanes as a sum has. The copies of 32 elements go through L1, which
/// costs less than reading x.
template <class T, class Step>
HWY_INLINE Sum<double> over_lanes(const T* x, std::size_t count, Step step) {
  constexpr std::size_t kGroup = 512;
  static_assert(kGroup % kSumLanes == 0);
  Sum<double> sum;
  const auto one = [&](std::size_t p, Vec<double> v) HWY_ATTR { sum.part[p] = step(sum.part[p], v); };
  if constexpr (sizeof(T) == sizeof(double)) {
    reduce<double>(count, one, x);
  } else {
    alignas(64) double doubles[kGroup];
    for (std::size_t i = 0; i < count; i += kGroup) {
      const std::size_t n = count - i < kGroup ? count - i : kGroup;
      for (std::size_t j = 0; j < n; ++j) doubles[j] = static_cast<double>(x[i + j]);
      reduce<double>(n, one, static_cast<const double*>(doubles));
    }
  }
  return sum;
}

template <class T>
double sum_of_magnitudes(const T* x, std::size_t count) {
  return over_lanes<T>(x, count, [](Vec<double> s, Vec<double> v) HWY_ATTR { return hn::Add(s, hn::Abs(v)); }).total();
}
template <class T>
double sum_of_squares(const T* x, std::size_t count) {
  return over_lanes<T>(x, count, [](Vec<double> s, Vec<double> v) HWY_ATTR { return mul_add<double>(v, v, s); })
      .total();
}
template <class T>
double sum_of_cubes(const T* x, std::size_t count) {
  return over_lanes<T>(x, count,
                       [](Vec<double> s, Vec<double> v)
                           HWY_ATTR { return mul_add<double>(hn::Mul(v, v), hn::Abs(v), s); })
      .total();
}
template <class T>
double largest_magnitude(const T* x, std::size_t count) {
  const auto larger = [](Vec<double> s, Vec<double> v) HWY_ATTR {
    const auto magnitude = hn::Abs(v);
    return hn::IfThenElse(hn::Or(hn::Gt(magnitude, s), hn::IsNaN(v)), magnitude, s);
  };
  return over_lanes<T>(x, count, larger).largest();
}

template <class T>
constexpr OptimizerTable<T> kTable{
    &sgd<T>, &adam<T>, {&sum_of_magnitudes<T>, &sum_of_squares<T>, &sum_of_cubes<T>, &largest_magnitude<T>}};
TESSERA_KERNEL_TABLES(OptimizerTable, optimizer_tables)

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
TESSERA_CHOSEN_KERNELS(OptimizerTable, optimizer_tables)
namespace {

/// Processes [begin, end) in blocks that stay in L1: converts gradients to f32 before and rounds new values after.
template <class N, class Step, class Kernel>
void run_half(const Step& step, std::size_t begin, std::size_t end, Kernel kernel) {
  constexpr std::size_t kBlock = 1024;
  alignas(64) float widened[kBlock];
  for (std::size_t at = begin; at < end; at += kBlock) {
    Step block = elements_of(step, at, std::min(end, at + kBlock));
    if (step.half.gradient != nullptr) {
      const N* from = static_cast<const N*>(step.half.gradient) + at;
      for (std::size_t i = 0; i < block.count; ++i) widened[i] = static_cast<float>(from[i]);
      block.gradient = widened;
    }
    kernel(block);
    if (step.half.copy == nullptr) continue;
    N* to = static_cast<N*>(step.half.copy) + at;
    for (std::size_t i = 0; i < block.count; ++i) to[i] = static_cast<N>(block.parameter[i]);
  }
}

template <class T, template <class> class Step>
void run_tiles(ThreadPool& pool, Step<T> step, void (*kernel)(const Step<T>&)) {
  if (step.grad_scale_at != nullptr) step.grad_scale = *step.grad_scale_at;
  if (std::isnan(step.grad_scale)) return;  // non-finite gradients: nothing changes
  for_tiles(pool, step.count, kElementTile, [&](std::size_t begin, std::size_t end) {
    if constexpr (sizeof(T) == sizeof(float)) {
      if (step.half.dtype == base::DType::f16) return run_half<base::f16>(step, begin, end, kernel);
      if (step.half.dtype == base::DType::bf16) return run_half<base::bf16>(step, begin, end, kernel);
    }
    kernel(elements_of(step, begin, end));
  });
}

template <class T>
std::vector<double> tile_parts(ThreadPool& pool, const T* x, std::size_t count,
                               double (*kernel)(const T*, std::size_t)) {
  std::vector<double> part(tiles_of(count, kElementTile));
  for_tiles(pool, count, kElementTile,
            [&](std::size_t begin, std::size_t end) { part[begin / kElementTile] = kernel(x + begin, end - begin); });
  return part;
}

double largest_of(const std::vector<double>& parts) {
  double largest = 0;
  for (const double value : parts) largest = std::isnan(value) || value > largest ? value : largest;
  return largest;
}

}  // namespace

template <class T>
void sgd_step(ThreadPool& pool, const SgdStep<T>& args) {
  if ((args.momentum_buffer != nullptr) != (args.momentum != 0) && args.count > 0)
    throw base::InvalidUsage("sgd: momentum " + std::to_string(args.momentum) +
                             (args.momentum_buffer ? " needs no buffer; pass null" : " needs a momentum buffer"));
  if (args.nesterov && args.momentum == 0) throw base::InvalidUsage("sgd: nesterov needs a momentum above 0");
  run_tiles<T>(pool, args, kernels<T>().sgd);
}

template <class T>
void adam_step(ThreadPool& pool, const AdamStep<T>& args) {
  if (args.step < 1) throw base::InvalidUsage("adam: step 0; the first step is 1");
  run_tiles<T>(pool, args, kernels<T>().adam);
}

template void sgd_step<float>(ThreadPool&, const SgdStep<float>&);
template void sgd_step<double>(ThreadPool&, const SgdStep<double>&);
template void adam_step<float>(ThreadPool&, const AdamStep<float>&);
template void adam_step<double>(ThreadPool&, const AdamStep<double>&);

template <class T>
double norm_part(ThreadPool& pool, Norm norm, const T* x, std::size_t count) {
  const auto parts = tile_parts<T>(pool, x, count, kernels<T>().norms[static_cast<std::size_t>(norm)]);
  return norm == Norm::infinity ? largest_of(parts) : std::accumulate(parts.begin(), parts.end(), 0.0);
}

template double norm_part<float>(ThreadPool&, Norm, const float*, std::size_t);
template double norm_part<double>(ThreadPool&, Norm, const double*, std::size_t);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
