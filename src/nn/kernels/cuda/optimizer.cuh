// Optimizer steps over flat ranges, with the operations of kernels/cpu/optimizer.cpp in the same order, and the
// clipping factor.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"

namespace tessera::nn::cuda {

template <int n, class C, class T>
TESSERA_DEVICE void store_copy(C* copy, std::size_t i, const Pack<T, n>& values) {
  if (copy == nullptr) return;
  Pack<C, n> rounded;
  for (int e = 0; e < n; ++e) rounded.at[e] = from_opmath<C>(values.at[e]);
  store<n>(copy + i, rounded);
}

/// Calls function(gradient, copy) with their element types.
template <class N, class T, template <class> class Step, class Function>
void with_half_of(const Step<T>& a, const Function& function) {
  auto* copy = static_cast<N*>(a.half.copy);
  if (a.half.gradient != nullptr) return function(static_cast<const N*>(a.half.gradient), copy);
  function(a.gradient, copy);
}
template <class T, template <class> class Step, class Function>
void with_half(const Step<T>& a, const Function& function) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (a.half.dtype == DType::bf16) return with_half_of<bf16>(a, function);
    if (a.half.dtype == DType::f16) return with_half_of<f16>(a, function);
  }
  function(a.gradient, static_cast<T*>(nullptr));
}

/// Scalar arguments of a step, rounded once on the host as the host's kernels do. The gradient's factor may be known
/// only on the device. G: element type of the gradient, C: that of the copy, if any.
template <class T, class G, class C>
struct AdamBody {
  T *parameter, *first, *second, *largest;
  const G* gradient;
  C* copy;
  T coupled, kept, rest1, beta2, rest2, rate, root2, eps;
  double grad_scale;
  const double* grad_scale_at;
  bool maximize;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const double factor = grad_scale_at ? *grad_scale_at : grad_scale;
    if (factor != factor) return;  // non-finite gradients: nothing changes
    const T scale = static_cast<T>(maximize ? -factor : factor);
    Pack<T, n> p = load<n>(static_cast<const T*>(parameter) + i), m = load<n>(static_cast<const T*>(first) + i);
    Pack<T, n> v = load<n>(static_cast<const T*>(second) + i), most = {};
    if (largest) most = load<n>(static_cast<const T*>(largest) + i);
    const Pack<G, n> dp = load<n>(gradient + i);
    for (int e = 0; e < n; ++e) {
      const T g = fused(coupled, p.at[e], scale * to_opmath(dp.at[e]));
      m.at[e] = fused(rest1, g - m.at[e], m.at[e]);
      v.at[e] = fused(rest2 * g, g, beta2 * v.at[e]);
      most.at[e] = larger(most.at[e], v.at[e]);
      const T denominator = fused(root(largest ? most.at[e] : v.at[e]), root2, eps);
      p.at[e] = fused(-rate, m.at[e] / denominator, kept * p.at[e]);
    }
    store<n>(parameter + i, p);
    store_copy<n>(copy, i, p);
    store<n>(first + i, m);
    store<n>(second + i, v);
    if (largest) store<n>(largest + i, most);
  }
};

template <class T, class G, class C>
void adam_step_of(NativeStream stream, const kernels::AdamStep<T>& a, const G* gradient, C* copy) {
  if (a.step < 1) throw base::InvalidUsage("adam: step 0; the first step is 1");
  const double steps = static_cast<double>(a.step);
  const double correction1 = 1 - std::pow(a.beta1, steps);
  const double correction2 = std::sqrt(1 - std::pow(a.beta2, steps));
  const AdamBody<T, G, C> body{.parameter = a.parameter,
                               .first = a.first_moment,
                               .second = a.second_moment,
                               .largest = a.max_second_moment,
                               .gradient = gradient,
                               .copy = copy,
                               .coupled = static_cast<T>(a.decoupled ? 0 : a.weight_decay),
                               .kept = static_cast<T>(a.decoupled ? 1 - a.learning_rate * a.weight_decay : 1),
                               .rest1 = static_cast<T>(1 - a.beta1),
                               .beta2 = static_cast<T>(a.beta2),
                               .rest2 = static_cast<T>(1 - a.beta2),
                               .rate = static_cast<T>(a.learning_rate / correction1),
                               .root2 = static_cast<T>(1 / correction2),
                               .eps = static_cast<T>(a.eps),
                               .grad_scale = a.grad_scale,
                               .grad_scale_at = a.grad_scale_at,
                               .maximize = a.maximize};
  for_elements<kVector<T>>(stream, a.count,
                           {a.parameter, gradient, copy, a.first_moment, a.second_moment, a.max_second_moment}, body);
}

template <class T>
void adam_step(NativeStream stream, const kernels::AdamStep<T>& a) {
  with_half(a, [&](auto* gradient, auto* copy) { adam_step_of(stream, a, gradient, copy); });
}

template <class T, class G, class C>
struct SgdBody {
  T *parameter, *buffer;
  const G* gradient;
  C* copy;
  T decay, momentum, rate;
  double grad_scale;
  const double* grad_scale_at;
  bool maximize, nesterov, first_step;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const double factor = grad_scale_at ? *grad_scale_at : grad_scale;
    if (factor != factor) return;  // non-finite gradients: nothing changes
    const T scale = static_cast<T>(maximize ? -factor : factor);
    Pack<T, n> p = load<n>(static_cast<const T*>(parameter) + i), kept = {};
    if (buffer && !first_step) kept = load<n>(static_cast<const T*>(buffer) + i);
    const Pack<G, n> dp = load<n>(gradient + i);
    for (int e = 0; e < n; ++e) {
      T g = fused(decay, p.at[e], scale * to_opmath(dp.at[e]));
      if (buffer) {
        kept.at[e] = first_step ? g : fused(momentum, kept.at[e], g);
        g = nesterov ? fused(momentum, kept.at[e], g) : kept.at[e];
      }
      p.at[e] = fused(-rate, g, p.at[e]);
    }
    store<n>(parameter + i, p);
    store_copy<n>(copy, i, p);
    if (buffer) store<n>(buffer + i, kept);
  }
};

template <class T, class G, class C>
void sgd_step_of(NativeStream stream, const kernels::SgdStep<T>& a, const G* gradient, C* copy) {
  if ((a.momentum_buffer != nullptr) != (a.momentum != 0) && a.count > 0)
    throw base::InvalidUsage("sgd: momentum " + std::to_string(a.momentum) +
                             (a.momentum_buffer ? " needs no buffer; pass null" : " needs a momentum buffer"));
  if (a.nesterov && a.momentum == 0) throw base::InvalidUsage("sgd: nesterov needs a momentum above 0");
  const SgdBody<T, G, C> body{.parameter = a.parameter,
                              .buffer = a.momentum_buffer,
                              .gradient = gradient,
                              .copy = copy,
                              .decay = static_cast<T>(a.weight_decay),
                              .momentum = static_cast<T>(a.momentum),
                              .rate = static_cast<T>(a.learning_rate),
                              .grad_scale = a.grad_scale,
                              .grad_scale_at = a.grad_scale_at,
                              .maximize = a.maximize,
                              .nesterov = a.nesterov,
                              .first_step = a.first_step};
  for_elements<kVector<T>>(stream, a.count, {a.parameter, gradient, copy, a.momentum_buffer}, body);
}

template <class T>
void sgd_step(NativeStream stream, const kernels::SgdStep<T>& a) {
  with_half(a, [&](auto* gradient, auto* copy) { sgd_step_of(stream, a, gradient, copy); });
}

/// One thread adds in order: there are only a few numbers per unit, and all strategies must add them in the same order.
struct ClipNumbers {
  kernels::Norm norm;
  const double* parts;
  std::size_t count;
  bool clips;
  double most, loss_scale;
  bool skips;
  double* out;
};
TESSERA_PLAIN_KERNEL void clip_kernel(ClipNumbers a) {
  if (thread_index() != 0) return;
  const bool largest = a.norm == kernels::Norm::infinity;
  double norm = 0;
  for (std::size_t i = 0; i < a.count; ++i) norm = largest ? LargestOrNaN{}(norm, a.parts[i]) : norm + a.parts[i];
  if (a.norm == kernels::Norm::two) norm = root(norm);
  if (a.norm == kernels::Norm::three) norm = cube_root(norm);
  norm /= a.loss_scale;
  a.out[0] = norm;
  const double factor = a.clips ? a.most / (norm + 1e-6) : 1.0;
  a.out[1] = (factor < 1.0 ? factor : 1.0) / a.loss_scale;
  if (a.skips && !(norm - norm == 0)) a.out[1] = norm - norm;  // NaN
}
inline void clip_factor(NativeStream stream, const ClipArgs& a) {
  launch(stream, {.blocks = 1, .threads = 32}, clip_kernel,
         ClipNumbers{a.norm, a.parts, a.count, a.most.has_value(), a.most.value_or(0), a.loss_scale, a.skips, a.out});
}

}  // namespace tessera::nn::cuda
