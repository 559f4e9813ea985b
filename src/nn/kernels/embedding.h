// Embedding: rows of a table by id.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// y[r, :] = weight[ids[r], :], or += if `accumulate` (so that token and position embeddings need one buffer). An id
/// outside [0, vocabulary) throws InvalidUsage before anything is written.
template <class T>
struct EmbeddingForward {
  const T* weight = nullptr;          ///< [vocabulary, width]
  const std::int32_t* ids = nullptr;  ///< [rows]
  T* y = nullptr;                     ///< [rows, width]
  std::size_t rows = 0,               ///< rows of ids and y
      vocabulary = 0,                 ///< rows of weight
      width = 0;                      ///< width of weight and y
  bool accumulate = false;            ///< true: y += ...
};
/// Looks up the rows as EmbeddingForward says.
template <class T>
TESSERA_API void embedding_forward(ThreadPool& pool, const EmbeddingForward<T>& args);

/// dweight[ids[r], :] += dy[r, :] in the order of r; without `accumulate` the whole table is zeroed first.
template <class T>
struct EmbeddingBackward {
  const std::int32_t* ids = nullptr;  ///< [rows]
  const T* dy = nullptr;              ///< [rows, width], gradient of y
  T* dweight = nullptr;               ///< [vocabulary, width]
  std::size_t rows = 0,               ///< rows of ids and dy
      vocabulary = 0,                 ///< rows of dweight
      width = 0;                      ///< width of dweight and dy
  bool accumulate = false;            ///< false: dweight is zeroed first
};
/// Adds up the gradient as EmbeddingBackward says.
template <class T>
TESSERA_API void embedding_backward(ThreadPool& pool, const EmbeddingBackward<T>& args);

}  // namespace tessera::nn::kernels
