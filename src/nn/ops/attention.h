// Fused causal self-attention: no buffer of size positions^2 exists.
#pragma once

#include <string_view>

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// Dropout of the attention weights, as in ops::dropout: the mask depends on `module` (a path) and is never stored.
struct AttentionDropoutOptions {
  double probability = 0.0;  ///< 0: none
  std::string_view module;   ///< valid during the call
};

/// GPT-2's variant: qkv[batch, position, 3 * heads * dim] (all queries, then keys, then values) -> [batch, position,
/// heads * dim]. Saves qkv, the output and one number per row and head. `scale`: of the scores; 0: 1 / sqrt(dim).
TESSERA_API Tensor causal_attention(const Tensor& qkv, std::int64_t heads, const AttentionDropoutOptions& dropout = {},
                                    double scale = 0.0);

/// The heads of a grouped-query attention.
struct AttentionHeads {
  std::int64_t heads = 1;     ///< query heads
  std::int64_t kv_heads = 1;  ///< divides heads: query head h reads key head h / (heads / kv_heads)
};

/// q[batch, position, heads * dim]; k, v[batch, position, kv_heads * dim] -> the shape of q. Scores are scaled by 1 /
/// sqrt(dim).
TESSERA_API Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionHeads heads,
                                    const AttentionDropoutOptions& dropout = {});

}  // namespace tessera::nn::ops
