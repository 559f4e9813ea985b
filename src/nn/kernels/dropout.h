// Dropout. The mask is drawn again in backward (the same call on the gradient), never stored.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/nn/random.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// y = x / (1 - p) where kept, else 0; x[samples, elements]. Forward and backward alike; y may be x.
template <class T>
struct DropoutArgs {
  RandomStream stream;  ///< dropout_stream() of the first sample; that of sample s has s added to `high`
  double probability = 0;  ///< in [0, 1), else InvalidUsage
  std::size_t samples = 0, elements = 0;
  const T* x = nullptr;
  T* y = nullptr;
  bool accumulate = false;  ///< y += ...
};
template <class T>
TESSERA_API void dropout(ThreadPool& pool, const DropoutArgs<T>& args);

}  // namespace tessera::nn::kernels
