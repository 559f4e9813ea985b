// Dropout. The mask is drawn again in backward (the same call on the gradient), never stored.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// What decides an element's fate, with its index within the sample.
struct DropoutKey {
  std::uint64_t seed = 0;
  std::uint64_t step = 0;
  std::string_view module;         ///< the module's full name
  std::uint64_t first_sample = 0;  ///< global index of this range's first sample
};

/// y = x / (1 - p) where kept, else 0; x[samples, elements]. Forward and backward alike; y may be x.
template <class T>
struct DropoutArgs {
  DropoutKey key;
  double probability = 0;  ///< in [0, 1), else InvalidUsage
  std::size_t samples = 0, elements = 0;
  const T* x = nullptr;
  T* y = nullptr;
  bool accumulate = false;  ///< y += ...
};
template <class T>
TESSERA_API void dropout(ThreadPool& pool, const DropoutArgs<T>& args);

}  // namespace tessera::nn::kernels
