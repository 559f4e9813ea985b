// Fused, blocked self-attention with grouped-query heads: online softmax over blocks of keys (T. Dao et al.,
// "FlashAttention", 2022), with probabilities recomputed in backward. Memory beyond inputs and outputs: one number per
// row and head, and a few blocks of scratch per thread; never a buffer of size positions^2.
#pragma once

#include <cstddef>

#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/random.h"
#include "tessera/nn/thread_pool.h"

namespace tessera::nn::kernels {

/// Positions per block of queries or keys.
inline constexpr std::size_t kAttentionBlock = 64;

/// The most bytes of workspace that a vendor's library gets for attention on a device. A backward with fixed bits keeps
/// a gradient of all scores there, positions^2 elements per head. Where that is more, this library's kernels compute
/// it, whose memory grows with the positions alone.
inline constexpr std::size_t kMaxAttentionWorkspace = std::size_t{1} << 30;

/// Element d of head h at position t of batch b: data[b*batch_stride + t*position_stride + h*head_stride + d].
template <class T>
struct HeadsView {
  T* data = nullptr;             ///< first element
  std::size_t batch_stride = 0,  ///< batch stride in elements
      position_stride = 0,       ///< position stride in elements
      head_stride = 0;           ///< head stride in elements; dim elements of a head are contiguous
};

/// View of a contiguous [batch, positions, heads, dim] tensor.
template <class T>
HeadsView<T> heads_view(T* data, std::size_t positions, std::size_t heads, std::size_t dim) {
  return {data, positions * heads * dim, heads * dim, dim};
}

/// View of part 0 (q), 1 (k) or 2 (v) of a contiguous [batch, positions, 3, heads, dim] tensor.
template <class T>
HeadsView<T> fused_qkv_view(T* qkv, std::size_t part, std::size_t positions, std::size_t heads, std::size_t dim) {
  return {qkv + part * heads * dim, positions * 3 * heads * dim, 3 * heads * dim, dim};
}

/// The extents of an attention.
struct AttentionShape {
  std::size_t batch = 0,     ///< sequences
      positions = 0;         ///< positions of each sequence
  std::size_t heads = 0;     ///< query heads
  std::size_t kv_heads = 0;  ///< divides heads; query head h reads kv head h / (heads / kv_heads)
  std::size_t dim = 0;       ///< elements of one head
  double scale = 0;          ///< scale of the scores; 0: 1 / sqrt(dim)
  bool causal = true;        ///< queries see no later keys; false: they see all
};

/// Dropout of the attention weights, whose mask backward regenerates: word (h * positions + query) * positions + key of
/// the sample's stream decides whether weight (query, key) of head h is dropped. Kept weights are divided by 1 -
/// probability.
struct AttentionDropout {
  double probability = 0;  ///< 0: none
  RandomStream stream;     ///< dropout_stream of the batch's first sample; sample b adds b to `high`
};

/// Bytes of scratch for elements of `element_bytes` on a pool of `threads`. Forward: a few blocks per thread,
/// independent of the number of positions. Backward: also one element per batch entry, head and position.
TESSERA_API std::size_t attention_forward_scratch_bytes(const AttentionShape& shape, std::size_t threads,
                                                        std::size_t element_bytes);
/// The same as attention_forward_scratch_bytes(), for the backward.
TESSERA_API std::size_t attention_backward_scratch_bytes(const AttentionShape& shape, std::size_t threads,
                                                         std::size_t element_bytes);

/// Arguments of attention_forward().
template <class T>
struct AttentionForward {
  AttentionShape shape;  ///< shape of all views
  HeadsView<const T> q,  ///< queries, `heads` heads
      k,                 ///< keys, `kv_heads` heads
      v;                 ///< values, `kv_heads` heads
  HeadsView<T> out;      ///< usually heads_view(y, positions, heads, dim) with y[batch, positions, heads * dim]
  OpMath<T>* log_sum_exp = nullptr;  ///< [batch, heads, positions], saved for backward; may be null
  void* scratch = nullptr;           ///< attention_forward_scratch_bytes, aligned to 64
  AttentionDropout dropout;          ///< none by default
};
/// out = softmax(scale * q k^T) v for each head, over the keys that a query sees, with dropout of the weights.
template <class T>
TESSERA_API void attention_forward(ThreadPool& pool, const AttentionForward<T>& args);

/// Gradients may be views of one fused dqkv. All three are required.
template <class T>
struct AttentionBackward {
  AttentionShape shape;                    ///< the same as in forward
  HeadsView<const T> q,                    ///< the same as in forward
      k,                                   ///< the same as in forward
      v;                                   ///< the same as in forward
  HeadsView<const T> out,                  ///< forward's output
      dout;                                ///< its gradient
  const OpMath<T>* log_sum_exp = nullptr;  ///< value that forward saved
  HeadsView<T> dq,                         ///< gradient of q
      dk,                                  ///< gradient of k
      dv;                                  ///< gradient of v
  bool accumulate_dq = false,              ///< true: dq += ...
      accumulate_dk = false,               ///< true: dk += ...
      accumulate_dv = false;               ///< true: dv += ...
  void* scratch = nullptr;                 ///< attention_backward_scratch_bytes, aligned to 64
  AttentionDropout dropout;                ///< the same as in forward
};
/// The gradients of attention_forward().
template <class T>
TESSERA_API void attention_backward(ThreadPool& pool, const AttentionBackward<T>& args);

}  // namespace tessera::nn::kernels
