// Common code of the attention forward and backward: the scratch of one thread, and blocks of rows, in place or padded.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/attention.h"

namespace tessera::nn::kernels {

/// Row length of a padded block, in elements. Block products read B operands in whole vectors.
constexpr std::size_t padded_dim(std::size_t dim) { return (dim + 15) / 16 * 16; }

/// Elements of one block [kAttentionBlock, padded_dim] (also of its transpose), and of one block of scores.
constexpr std::size_t rows_block(std::size_t dim) { return kAttentionBlock * padded_dim(dim); }
inline constexpr std::size_t kScoreBlock = kAttentionBlock * kAttentionBlock;

/// A block of rows of one head.
template <class T>
struct Rows {
  T* data = nullptr;
  std::size_t stride = 0;
};

template <class T>
Rows<T> rows_of(const HeadsView<T>& view, std::size_t b, std::size_t h, std::size_t position) {
  return {view.data + b * view.batch_stride + h * view.head_stride + position * view.position_stride,
          view.position_stride};
}

/// Returns the rows themselves if their length is a multiple of whole vectors, else a zero-padded copy in `room`.
template <class T>
Rows<const T> padded(Rows<const T> rows, std::size_t count, std::size_t dim, T* room) {
  const std::size_t stride = padded_dim(dim);
  if (stride == dim) return rows;
  for (std::size_t r = 0; r < count; ++r) {
    std::copy(rows.data + r * rows.stride, rows.data + r * rows.stride + dim, room + r * stride);
    std::fill(room + r * stride + dim, room + (r + 1) * stride, T(0));
  }
  return {room, stride};
}

inline double score_scale(const AttentionShape& shape) {
  return shape.scale != 0 ? shape.scale : 1 / std::sqrt(static_cast<double>(shape.dim));
}

inline void check(const AttentionShape& shape) {
  if (shape.kv_heads == 0 || shape.heads % shape.kv_heads != 0 || shape.dim == 0)
    throw base::InvalidUsage("attention: " + std::to_string(shape.heads) + " heads of " + std::to_string(shape.dim) +
                             " over " + std::to_string(shape.kv_heads) +
                             " key/value heads; the latter must divide the former");
}

/// A block of attention weights or their gradients. Element (q, k) is data[q * query_stride + k * key_stride].
template <class T>
struct WeightBlock {
  T* data = nullptr;
  std::size_t query_stride = 0, key_stride = 0;
  std::size_t batch = 0, head = 0;
  std::size_t first_query = 0, queries = 0;
  std::size_t first_key = 0, keys = 0;
};

/// Multiplies the weights of the keys that a query sees by 0 if dropped and by 1 / (1 - probability) if kept.
template <class T>
void drop_weights(const AttentionShape& shape, const AttentionDropout& dropout, const WeightBlock<T>& block) {
  if (dropout.probability == 0) return;
  const auto threshold = static_cast<std::uint32_t>(std::min(std::ldexp(dropout.probability, 32), 4294967295.0));
  const T factor = static_cast<T>(1 / (1 - dropout.probability));
  const RandomStream stream{dropout.stream.key, dropout.stream.high + block.batch};
  std::uint32_t words[kAttentionBlock];
  for (std::size_t q = 0; q < block.queries; ++q) {
    const std::size_t query = block.first_query + q;
    const std::size_t keys = shape.causal ? std::min(block.keys, query + 1 - block.first_key) : block.keys;
    const std::uint64_t begin = (block.head * shape.positions + query) * shape.positions + block.first_key;
    random_words(stream, begin, begin + keys, words);
    T* at = block.data + q * block.query_stride;
    for (std::size_t k = 0; k < keys; ++k) at[k * block.key_stride] *= words[k] < threshold ? T(0) : factor;
  }
}

/// Scratch elements of one thread.
constexpr std::size_t forward_scratch(std::size_t dim) {
  return 3 * rows_block(dim) + kScoreBlock + 3 * kAttentionBlock;
}
constexpr std::size_t backward_scratch(std::size_t dim) { return 8 * rows_block(dim) + 2 * kScoreBlock; }

}  // namespace tessera::nn::kernels
