#include "tessera/nn/kernels/cuda/cudnn_attention_graph.h"

#include <limits>

namespace tessera::nn::cuda {
namespace {

/// Scores and their gradients are [batch, heads, queries, keys] and never leave the engine, but for what the library
/// keeps in its workspace.
class Builder {
 public:
  Builder(CudnnGraph& graph, const CudnnAttentionProblem& problem)
      : graph_(graph),
        p_(problem),
        scores_(CudnnLayout::packed(p_.batch, p_.heads, p_.positions, p_.positions)),
        rows_(CudnnLayout::packed(p_.batch, p_.heads, p_.positions, 1)),
        type_(p_.dtype == DType::f16 ? CUDNN_DATA_HALF : CUDNN_DATA_BFLOAT16) {}

  void forward() {
    const CudnnTensor q = memory(AttentionTensor::q, of_heads(p_.heads, p_.q)),
                      k = memory(AttentionTensor::k, of_heads(p_.kv_heads, p_.k).transposed()),
                      v = memory(AttentionTensor::v, of_heads(p_.kv_heads, p_.v)),
                      out = memory(AttentionTensor::out, of_heads(p_.heads, p_.out));
    const CudnnTensor scores = masked(scaled(product(q, k)));
    const CudnnTensor most = row_values(), sum = row_values(), log_of_sum = row_values();
    graph_.reduce(CUDNN_REDUCE_TENSOR_MAX, scores, most);
    const CudnnTensor exponentials = result(CUDNN_POINTWISE_EXP, result(CUDNN_POINTWISE_SUB, scores, &most));
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, exponentials, sum);
    graph_.pointwise(CUDNN_POINTWISE_LOG, sum, log_of_sum);
    graph_.pointwise(CUDNN_POINTWISE_ADD, most, log_sum_exp(), {.b = &log_of_sum});
    const CudnnTensor weights = graph_.intermediate(type_, scores_);
    graph_.pointwise(CUDNN_POINTWISE_DIV, exponentials, weights, {.b = &sum});
    graph_.matmul(weights, v, out);
  }

  void backward() {
    const CudnnTensor q = memory(AttentionTensor::q, of_heads(p_.heads, p_.q)),
                      k = memory(AttentionTensor::k, of_heads(p_.kv_heads, p_.k).transposed()),
                      v = memory(AttentionTensor::v, of_heads(p_.kv_heads, p_.v).transposed()),
                      dout = memory(AttentionTensor::dout, of_heads(p_.heads, p_.dout));
    const CudnnTensor row_sums = sums_with_output(dout), statistics = log_sum_exp();
    const CudnnTensor exponents = result(CUDNN_POINTWISE_SUB, scaled(product(q, k)), &statistics);
    const CudnnTensor weights = result(CUDNN_POINTWISE_EXP, masked(exponents));
    multiply_transposed(weights, dout, AttentionTensor::dv, p_.dv);

    const CudnnTensor centered = result(CUDNN_POINTWISE_SUB, product(dout, v), &row_sums);
    const CudnnTensor dscores = scaled(result(CUDNN_POINTWISE_MUL, centered, &weights));
    multiply_transposed(dscores, q, AttentionTensor::dk, p_.dk);

    // dq is one product over all keys. In the library's other form blocks of keys add to dq in any order, and two runs
    // differ.
    const CudnnTensor rows_of_k = graph_.intermediate(type_, of_heads(p_.kv_heads, p_.k));
    graph_.view(k, rows_of_k);
    graph_.matmul(dscores, rows_of_k, memory(AttentionTensor::dq, of_heads(p_.heads, p_.dq)));
  }

 private:
  CudnnLayout of_heads(std::int64_t heads, const HeadsStrides& s) const {
    return {{p_.batch, heads, p_.positions, p_.dim}, {s.batch, s.head, s.position, 1}};
  }
  CudnnTensor memory(AttentionTensor id, const CudnnLayout& layout) {
    return graph_.tensor(static_cast<std::int64_t>(id), type_, layout);
  }
  CudnnTensor log_sum_exp() {
    return graph_.tensor(static_cast<std::int64_t>(AttentionTensor::log_sum_exp), CUDNN_DATA_FLOAT, rows_);
  }
  CudnnTensor row_values() { return graph_.intermediate(CUDNN_DATA_FLOAT, rows_); }

  CudnnTensor product(const CudnnTensor& a, const CudnnTensor& b) {
    const CudnnTensor c = graph_.intermediate(CUDNN_DATA_FLOAT, scores_);
    graph_.matmul(a, b, c);
    return c;
  }
  CudnnTensor result(cudnnPointwiseMode_t mode, const CudnnTensor& x, const CudnnTensor* b = nullptr) {
    const CudnnTensor y = graph_.intermediate(CUDNN_DATA_FLOAT, x.layout);
    graph_.pointwise(mode, x, y, {.b = b});
    return y;
  }
  CudnnTensor scaled(const CudnnTensor& x) {
    const CudnnTensor scale = graph_.scalar(p_.scale);
    return result(CUDNN_POINTWISE_MUL, x, &scale);
  }

  /// Keys behind the query get -infinity.
  CudnnTensor masked(const CudnnTensor& x) {
    const CudnnTensor query = graph_.intermediate(CUDNN_DATA_INT32, scores_),
                      key = graph_.intermediate(CUDNN_DATA_INT32, scores_),
                      visible = graph_.intermediate(CUDNN_DATA_BOOLEAN, scores_),
                      y = graph_.intermediate(CUDNN_DATA_FLOAT, scores_);
    const CudnnTensor hidden = graph_.scalar(-std::numeric_limits<float>::infinity());
    graph_.pointwise(CUDNN_POINTWISE_GEN_INDEX, x, query, {.axis = 2});
    graph_.pointwise(CUDNN_POINTWISE_GEN_INDEX, x, key, {.axis = 3});
    graph_.pointwise(CUDNN_POINTWISE_CMP_GE, query, visible, {.b = &key});
    graph_.pointwise(CUDNN_POINTWISE_BINARY_SELECT, x, y, {.b = &hidden, .t = &visible});
    return y;
  }

  /// The sum of dout * out for each row. Engines that drop weights multiply it by 1 - probability.
  CudnnTensor sums_with_output(const CudnnTensor& dout) {
    const CudnnTensor out = memory(AttentionTensor::out, of_heads(p_.heads, p_.out));
    const CudnnTensor products =
        graph_.intermediate(CUDNN_DATA_FLOAT, CudnnLayout::packed(p_.batch, p_.heads, p_.positions, p_.dim));
    graph_.pointwise(CUDNN_POINTWISE_MUL, dout, products, {.b = &out});
    const CudnnTensor sums = row_values();
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, products, sums);
    const CudnnTensor stored =
        graph_.tensor(static_cast<std::int64_t>(AttentionTensor::row_sums), CUDNN_DATA_FLOAT, rows_);
    const CudnnTensor one = graph_.scalar(1);
    graph_.pointwise(CUDNN_POINTWISE_MUL, sums, stored, {.b = &one});
    return stored;
  }

  /// The gradient `id` of keys or values: x^T y, summed over the query heads that share a head.
  void multiply_transposed(const CudnnTensor& x, const CudnnTensor& y, AttentionTensor id,
                           const HeadsStrides& strides) {
    const CudnnTensor columns = graph_.intermediate(type_, scores_.transposed());
    graph_.view(x, columns);
    const CudnnTensor gradient = memory(id, of_heads(p_.kv_heads, strides));
    if (p_.kv_heads == p_.heads) return graph_.matmul(columns, y, gradient);
    const CudnnTensor of_each =
        graph_.intermediate(type_, CudnnLayout::packed(p_.batch, p_.heads, p_.positions, p_.dim));
    graph_.matmul(columns, y, of_each);
    graph_.reduce(CUDNN_REDUCE_TENSOR_ADD, of_each, gradient);
  }

  CudnnGraph& graph_;
  const CudnnAttentionProblem& p_;
  const CudnnLayout scores_, rows_;
  const cudnnDataType_t type_;
};

}  // namespace

void add_attention(CudnnGraph& graph, const CudnnAttentionProblem& problem) {
  Builder builder(graph, problem);
  if (problem.backward) return builder.backward();
  builder.forward();
}

}  // namespace tessera::nn::cuda
