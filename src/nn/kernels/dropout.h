// Dropout. The mask is never stored; backward regenerates it (the same call on the gradient).
#pragma once

#include <cstddef>

#include "tessera/nn/random.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// y = x / (1 - p) where kept, else 0; x[samples, elements]. For forward and backward; y may be x.
template <class T>
struct DropoutArgs {
  RandomStream stream;      ///< dropout_stream() of the first sample; sample s adds s to `high`
  double probability = 0;   ///< probability in [0, 1), else InvalidUsage
  std::size_t samples = 0,  ///< each with its own stream
      elements = 0;         ///< elements of each sample
  const T* x = nullptr;     ///< input, or in backward the output's gradient
  T* y = nullptr;           ///< output, or in backward the input's gradient
  bool accumulate = false;  ///< y += ...
};
/// Runs dropout as DropoutArgs says.
template <class T>
TESSERA_API void dropout(ThreadPool& pool, const DropoutArgs<T>& args);

}  // namespace tessera::nn::kernels
