// Dropout. The mask is never stored; backward regenerates it (the same call on the gradient).
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/nn/random.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// y = x / (1 - p) where kept, else 0; x[samples, elements]. For forward and backward; y may be x.
template <class T>
struct DropoutArgs {
  RandomStream stream;  ///< dropout_stream() of the first sample; sample s adds s to `high`
  double probability = 0;  ///< in [0, 1), else InvalidUsage
  std::size_t samples = 0, elements = 0;
  const T* x = nullptr;
  T* y = nullptr;
  bool accumulate = false;  ///< y += ...
};
template <class T>
TESSERA_API void dropout(ThreadPool& pool, const DropoutArgs<T>& args);

}  // namespace tessera::nn::kernels
