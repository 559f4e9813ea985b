// Optimizer steps over flat ranges, with the operations of kernels/cpu/optimizer.cpp in the same order, and the
// clipping factor.
#pragma once

#include "tessera/base/portable_math.h"
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

/// Two factors of the weight decay, by which the parts of a step differ.
template <class T>
struct DecayFactors {
  T first, second;
};
/// The parts of one launch, in its arguments: a unit of a transformer has about ten.
inline constexpr std::size_t kDecayParts = 64;
template <class T>
struct DecayTable {
  std::size_t count;
  std::size_t end[kDecayParts];
  DecayFactors<T> factors[kDecayParts];
  /// Of element i: of the first part that ends behind it.
  TESSERA_DEVICE DecayFactors<T> at(std::size_t i) const {
    std::size_t low = 0, high = count - 1;
    while (low < high) {
      const std::size_t middle = (low + high) / 2;
      if (i < end[middle])
        high = middle;
      else
        low = middle + 1;
    }
    return factors[low];
  }
};

/// Calls launch_one(step, table, on_vectors) with up to kDecayParts parts at a time. `factors_of`: of a weight decay.
/// `on_vectors`: no vector of elements belongs to two parts.
template <class T, template <class> class Step, class Factors, class Launch>
void by_parts(const Step<T>& step, const Factors& factors_of, const Launch& launch_one) {
  const kernels::DecayPart all{step.count, step.weight_decay};
  const std::span<const kernels::DecayPart> parts = step.parts.empty() ? std::span(&all, 1) : step.parts;
  std::size_t begin = 0;
  for (std::size_t first = 0; first < parts.size(); first += kDecayParts) {
    DecayTable<T> table{.count = smaller(kDecayParts, parts.size() - first)};
    bool on_vectors = true;
    for (std::size_t i = 0; i < table.count; ++i) {
      const kernels::DecayPart& part = parts[first + i];
      table.end[i] = part.end - begin;
      table.factors[i] = factors_of(part.weight_decay);
      on_vectors = on_vectors && (i + 1 == table.count || table.end[i] % kVector<T> == 0);
    }
    const std::size_t end = parts[first + table.count - 1].end;
    launch_one(kernels::elements_of(step, begin, end), table, on_vectors);
    begin = end;
  }
}
template <class T, class Body>
void for_parts(NativeStream stream, std::size_t count, bool on_vectors, std::initializer_list<const void*> pointers,
               const Body& body) {
  if (on_vectors) return for_elements<kVector<T>>(stream, count, pointers, body);
  for_elements<1>(stream, count, pointers, body);
}

/// Scalar arguments of a step, rounded once on the host as the host's kernels do. The gradient's factor may be known
/// only on the device. G: element type of the gradient, C: that of the copy, if any.
template <class T, class G, class C>
struct AdamBody {
  T *parameter, *first, *second, *largest;
  const G* gradient;
  C* copy;
  T rest1, beta2, rest2, rate, root2, eps;
  double grad_scale;
  const double* grad_scale_at;
  bool maximize;
  DecayTable<T> decay;  // (decay added to the gradient, what is kept of the parameter)
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const double factor = grad_scale_at ? *grad_scale_at : grad_scale;
    if (factor != factor) return;  // non-finite gradients: nothing changes
    const T scale = static_cast<T>(maximize ? -factor : factor);
    const auto [coupled, kept] = decay.at(i);
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

/// The body of a step, without its arrays.
template <class T, class G, class C>
AdamBody<T, G, C> adam_scalars(const kernels::AdamStep<T>& a) {
  const double correction1 = 1 - base::portable::power(a.beta1, a.step);
  const double correction2 = std::sqrt(1 - base::portable::power(a.beta2, a.step));
  return {.rest1 = static_cast<T>(1 - a.beta1),
          .beta2 = static_cast<T>(a.beta2),
          .rest2 = static_cast<T>(1 - a.beta2),
          .rate = static_cast<T>(a.learning_rate / correction1),
          .root2 = static_cast<T>(1 / correction2),
          .eps = static_cast<T>(a.eps),
          .grad_scale = a.grad_scale,
          .grad_scale_at = a.grad_scale_at,
          .maximize = a.maximize};
}

template <class T>
void optimizer_step(NativeStream stream, const kernels::AdamStep<T>& all) {
  if (all.step < 1) throw base::InvalidUsage("adam: step 0; the first step is 1");
  const auto factors = [&all](double decay) {
    return DecayFactors<T>{static_cast<T>(all.decoupled ? 0 : decay),
                           static_cast<T>(all.decoupled ? 1 - all.learning_rate * decay : 1)};
  };
  by_parts(all, factors, [&](const kernels::AdamStep<T>& a, const DecayTable<T>& decay, bool on_vectors) {
    with_half(a, [&]<class G, class C>(const G* gradient, C* copy) {
      AdamBody<T, G, C> body = adam_scalars<T, G, C>(a);
      body.parameter = a.parameter, body.gradient = gradient, body.copy = copy, body.decay = decay;
      body.first = a.first_moment, body.second = a.second_moment, body.largest = a.max_second_moment;
      for_parts<T>(stream, a.count, on_vectors,
                   {a.parameter, gradient, copy, a.first_moment, a.second_moment, a.max_second_moment}, body);
    });
  });
}

template <class T, class G, class C>
struct SgdBody {
  T *parameter, *buffer;
  const G* gradient;
  C* copy;
  T momentum, rate;
  double grad_scale;
  const double* grad_scale_at;
  bool maximize, nesterov, first_step;
  DecayTable<T> decays;  // (decay, unused)
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    const double factor = grad_scale_at ? *grad_scale_at : grad_scale;
    if (factor != factor) return;  // non-finite gradients: nothing changes
    const T scale = static_cast<T>(maximize ? -factor : factor);
    const T decay = decays.at(i).first;
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

template <class T>
void optimizer_step(NativeStream stream, const kernels::SgdStep<T>& all) {
  if ((all.momentum_buffer != nullptr) != (all.momentum != 0) && all.count > 0)
    throw base::InvalidUsage("sgd: momentum " + std::to_string(all.momentum) +
                             (all.momentum_buffer ? " needs no buffer; pass null" : " needs a momentum buffer"));
  if (all.nesterov && all.momentum == 0) throw base::InvalidUsage("sgd: nesterov needs a momentum above 0");
  const auto factors = [](double decay) { return DecayFactors<T>{static_cast<T>(decay), T(0)}; };
  by_parts(all, factors, [&](const kernels::SgdStep<T>& a, const DecayTable<T>& decay, bool on_vectors) {
    with_half(a, [&]<class G, class C>(const G* gradient, C* copy) {
      const SgdBody<T, G, C> body{.parameter = a.parameter,
                                  .buffer = a.momentum_buffer,
                                  .gradient = gradient,
                                  .copy = copy,
                                  .momentum = static_cast<T>(a.momentum),
                                  .rate = static_cast<T>(a.learning_rate),
                                  .grad_scale = a.grad_scale,
                                  .grad_scale_at = a.grad_scale_at,
                                  .maximize = a.maximize,
                                  .nesterov = a.nesterov,
                                  .first_step = a.first_step,
                                  .decays = decay};
      for_parts<T>(stream, a.count, on_vectors, {a.parameter, gradient, copy, a.momentum_buffer}, body);
    });
  });
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
