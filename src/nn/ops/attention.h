// Fused self-attention: no buffer of size positions^2 exists.
#pragma once

#include <string_view>

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// Options of an attention. Dropout is of the attention weights, as in ops::dropout: the mask depends on `module` and
/// is never stored.
struct AttentionOptions {
  bool causal = true;       ///< each position sees itself and earlier ones; false: all
  double dropout = 0.0;     ///< probability; 0: none
  std::string_view module;  ///< its path; valid during the call
  double scale = 0.0;       ///< scale of the scores; 0: 1 / sqrt(dim)
};

/// GPT-2's variant: qkv[batch, position, 3 * heads * dim] (all queries, then keys, then values) -> [batch, position,
/// heads * dim]. Saves qkv, the output and one number per row and head.
TESSERA_API Tensor attention(const Tensor& qkv, std::int64_t heads, const AttentionOptions& options = {});

/// The heads of a grouped-query attention.
struct AttentionHeads {
  std::int64_t heads = 1;     ///< query heads
  std::int64_t kv_heads = 1;  ///< divides heads: query head h reads key head h / (heads / kv_heads)
};

/// q[batch, position, heads * dim]; k, v[batch, position, kv_heads * dim] -> the shape of q.
TESSERA_API Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionHeads heads,
                             const AttentionOptions& options = {});

}  // namespace tessera::nn::ops
