// Causal attention and its gradients as graphs of cuDNN operations, in the form that its fused engines recognize.
#pragma once

#include <compare>
#include <cstdint>

#include "tessera/nn/kernels/attention.h"
#include "tessera/nn/kernels/cuda/cudnn_graph.h"
#include "tessera/nn/types.h"

namespace tessera::nn::cuda {

/// Identifiers of the tensors that a plan reads and writes.
enum class AttentionTensor : std::int64_t { q = 1, k, v, out, log_sum_exp, dout, dq, dk, dv, row_sums };

/// Strides of a HeadsView.
struct HeadsStrides {
  std::int64_t batch = 0, position = 0, head = 0;
  auto operator<=>(const HeadsStrides&) const = default;
};

/// All that a plan depends on. The strides of gradients are 0 in the forward.
struct CudnnAttentionProblem {
  bool backward = false;
  DType dtype = DType::bf16;  ///< f16 or bf16
  std::int64_t batch = 0, positions = 0, heads = 0, kv_heads = 0, dim = 0;
  float scale = 0;
  HeadsStrides q, k, v, out, dout, dq, dk, dv;
  auto operator<=>(const CudnnAttentionProblem&) const = default;
};

/// Appends the operations of `problem`. The backward also writes `row_sums`, [batch, heads, positions] of f32, which
/// its second part reads.
void add_attention(CudnnGraph& graph, const CudnnAttentionProblem& problem);

}  // namespace tessera::nn::cuda
