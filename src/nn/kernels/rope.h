// Rotary position embedding in the convention of Hugging Face's Llama ("rotate_half": element i is paired with i +
// dim/2).
#pragma once

#include <cstddef>

#include "tessera/nn/kernels/attention.h"

namespace tessera::nn::kernels {

/// cosine[p, i] and sine[p, i] of p * theta^(-2i/dim), for p < positions, i < dim/2; computed in f64, rounded once.
template <class T>
TESSERA_API void rope_table(std::size_t positions, std::size_t dim, double theta, T* cosine, T* sine);

template <class T>
struct RopeArgs {
  std::size_t batch = 0, positions = 0, heads = 0, dim = 0;  ///< dim even, else InvalidUsage
  const Wide<T>* cosine = nullptr;                           ///< [positions, dim/2] of rope_table
  const Wide<T>* sine = nullptr;
  HeadsView<const T> in;
  HeadsView<T> out;       ///< may be the same memory as `in`
  bool inverse = false;   ///< rotates back, for the backward
  bool accumulate = false;
};
template <class T>
TESSERA_API void rope(ThreadPool& pool, const RopeArgs<T>& args);

}  // namespace tessera::nn::kernels
