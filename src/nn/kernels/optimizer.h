// Optimizer steps over flat ranges, one pass each; all settings have PyTorch's meaning. The update of an element
// depends only on its own values and the settings, so a range may be split anywhere (shard boundaries have no effect).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/base/optimizer.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

using base::HalfStep;

/// Elements of a step with one weight decay: from the end of the part before (from 0 if it is the first) to `end`.
struct DecayPart {
  std::size_t end = 0;      ///< end of the last part: the step's count
  double weight_decay = 0;  ///< instead of the step's own
};

/// The gradient is first multiplied by grad_scale (clipping, loss scaling); `maximize` then negates it.
template <class T>
struct SgdStep {
  T* parameter = nullptr;                 ///< [count], updated in place
  const T* gradient = nullptr;            ///< [count]; null if half.gradient holds it
  T* momentum_buffer = nullptr;           ///< null if and only if momentum == 0
  std::size_t count = 0;                  ///< elements
  double learning_rate = 1e-3;            ///< learning rate of this step
  double momentum = 0;                    ///< factor of the momentum buffer
  double weight_decay = 0;                ///< added to the gradient
  std::span<const DecayPart> parts = {};  ///< see KernelTable::sgd_step; none: all elements have `weight_decay`
  bool nesterov = false;                  ///< needs a momentum
  bool maximize = false;                  ///< true: ascends the gradient
  bool first_step = false;  ///< the buffer is set to the gradient instead of read (PyTorch's first step; dampening 0)
  double grad_scale = 1;    ///< factor of the gradient
  const double* grad_scale_at = nullptr;  ///< not null: read when the kernel runs, instead of grad_scale; NaN: no step
  HalfStep half;                          ///< none by default
};
/// One step of stochastic gradient descent on a range; ignores `parts`.
template <class T>
TESSERA_API void sgd_step(ThreadPool& pool, const SgdStep<T>& args);

/// Bias corrections are computed in f64 from `step`, which counts from 1.
template <class T>
struct AdamStep {
  T* parameter = nullptr;                 ///< [count], updated in place
  const T* gradient = nullptr;            ///< [count]; null if half.gradient holds it
  T* first_moment = nullptr;              ///< [count], updated in place; zeros before the first step
  T* second_moment = nullptr;             ///< [count], updated in place; zeros before the first step
  T* max_second_moment = nullptr;         ///< not null: amsgrad
  std::size_t count = 0;                  ///< elements
  std::uint64_t step = 1;                 ///< number of the step, from 1, for the bias corrections
  double learning_rate = 1e-3;            ///< learning rate of this step
  double beta1 = 0.9,                     ///< decay of the first moment
      beta2 = 0.999,                      ///< decay of the second moment
      eps = 1e-8;                         ///< added to the root of the second moment
  double weight_decay = 0;                ///< see `decoupled`
  std::span<const DecayPart> parts = {};  ///< the same as in SgdStep
  bool decoupled = true;  ///< true: AdamW (parameter *= 1 - lr * decay); false: Adam (decay added to the gradient)
  bool maximize = false;  ///< true: ascends the gradient
  double grad_scale = 1;  ///< factor of the gradient
  const double* grad_scale_at = nullptr;  ///< not null: read when the kernel runs, instead of grad_scale; NaN: no step
  HalfStep half;                          ///< none by default
};
/// One step of Adam or AdamW on a range; ignores `parts`.
template <class T>
TESSERA_API void adam_step(ThreadPool& pool, const AdamStep<T>& args);

/// Elements [begin, end) of an SgdStep or AdamStep, without its parts.
template <class Step>
Step elements_of(Step step, std::size_t begin, std::size_t end) {
  const auto move = [begin](auto*&... pointers) { ((pointers += pointers != nullptr ? begin : 0), ...); };
  const std::size_t bytes = begin * base::size_of(step.half.dtype);
  if (step.half.gradient != nullptr) step.half.gradient = static_cast<const std::byte*>(step.half.gradient) + bytes;
  if (step.half.copy != nullptr) step.half.copy = static_cast<std::byte*>(step.half.copy) + bytes;
  move(step.parameter, step.gradient);
  if constexpr (requires { step.momentum_buffer; })
    move(step.momentum_buffer);
  else
    move(step.first_moment, step.second_moment, step.max_second_moment);
  step.count = end - begin;
  step.parts = {};
  return step;
}
/// Calls run(step) for each part, with its elements and weight decay; without parts once, with `step`.
template <class Step, class Run>
void for_each_part(const Step& step, const Run& run) {
  if (step.parts.empty()) return run(step);
  std::size_t begin = 0;
  for (const DecayPart& part : step.parts) {
    Step own = elements_of(step, begin, part.end);
    own.weight_decay = part.weight_decay;
    run(own);
    begin = part.end;
  }
}

}  // namespace tessera::nn::kernels
