// Causal self-attention, fused: nothing of size positions^2 is ever in memory.
#pragma once

#include "tessera/nn/tensor.h"

namespace tessera::nn::ops {

/// GPT-2's form: qkv[batch, position, 3 * heads * dim] (all queries, then keys, then values) -> [batch, position, heads
/// * dim]. Saves qkv, the output and one number per row and head.
TESSERA_API Tensor causal_attention(const Tensor& qkv, std::int64_t heads);

struct AttentionHeads {
  std::int64_t heads = 1;
  std::int64_t kv_heads = 1;  ///< divides heads: query head h reads key head h / (heads / kv_heads)
};

/// q[batch, position, heads * dim]; k, v[batch, position, kv_heads * dim] -> as q. Scores are scaled by 1 / sqrt(dim).
TESSERA_API Tensor causal_attention(const Tensor& q, const Tensor& k, const Tensor& v, AttentionHeads heads);

}  // namespace tessera::nn::ops
