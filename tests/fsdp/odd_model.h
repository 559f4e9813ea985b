// A model whose sizes no world size divides.
#pragma once

#include "tessera/nn/models/causal_model.h"

namespace tessera::fsdp {

/// Width 36 in 3 heads, 3 blocks, odd vocabulary and context sizes.
inline nn::ModelConfig odd_model() {
  nn::ModelConfig model = nn::preset("gpt-nano");
  model.name = "odd";
  model.layers = 3;
  model.width = 36;
  model.heads = model.kv_heads = 3;
  model.head_dim = 12;
  model.hidden = 4 * 36;
  model.vocabulary = 257;
  model.context = 17;
  return model;
}

}  // namespace tessera::fsdp
