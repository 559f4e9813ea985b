// Rotary position embedding in the convention of Hugging Face's Llama ("rotate_half": element i is paired with i +
// dim/2).
#pragma once

#include <cstddef>

#include "tessera/nn/kernels/attention.h"

namespace tessera::nn::kernels {

/// Changes the frequencies theta^(-2i/dim) for contexts longer than those of the pretraining.
struct RopeScaling {
  double factor = 1;  ///< divides frequencies; 1: none
  double low = 0;     ///< Llama 3's: frequencies of up to `low` periods in `original_context` positions are divided
  double high = 0;    ///< those of `high` periods and more are kept, those between interpolated; 0: all are divided
  double original_context = 0;                          ///< positions of the pretraining
  bool operator==(const RopeScaling&) const = default;  ///< compares all members
};

/// cosine[p, i] and sine[p, i] of p * theta^(-2i/dim), scaled, for p < positions, i < dim/2; computed in f64, rounded
/// once.
template <class T>
TESSERA_API void rope_table(std::size_t positions, std::size_t dim, double theta, T* cosine, T* sine,
                            const RopeScaling& scaling = {});

/// Arguments of rope().
template <class T>
struct RopeArgs {
  std::size_t batch = 0,              ///< sequences
      positions = 0,                  ///< positions of each sequence
      heads = 0,                      ///< heads of each position
      dim = 0;                        ///< elements of one head; even, else InvalidUsage
  const OpMath<T>* cosine = nullptr;  ///< [positions, dim/2] of rope_table
  const OpMath<T>* sine = nullptr;    ///< [positions, dim/2] of rope_table
  HeadsView<const T> in;              ///< rotated head by head
  HeadsView<T> out;                   ///< may be the same memory as `in`
  bool inverse = false;               ///< rotates back, for the backward
  bool accumulate = false;            ///< true: out += ...
};
/// Rotates element pairs (i, i + dim/2) of each head by the angles of the table.
template <class T>
TESSERA_API void rope(ThreadPool& pool, const RopeArgs<T>& args);

}  // namespace tessera::nn::kernels
