// A forward and backward of attention, on any kernel table.
#pragma once

#include <functional>

#include "tests/nn/ops/cuda/compare.h"

namespace tessera::nn::test {

struct AttentionCase {
  std::size_t batch, positions, heads, kv_heads, dim;
  double dropout = 0;
  bool fused = false, accumulate = false;
  double scale = 0;
  bool causal = true;
  std::size_t offset = 0;  ///< of all arrays from a multiple of 16 bytes, in elements

  std::size_t queries() const { return batch * positions * heads * dim; }
  std::size_t keys() const { return queries() / heads * kv_heads; }
};

/// Inputs of attention, and a run of its forward and backward: (kernels, stream) -> all outputs.
class AttentionRun {
 public:
  template <class T>
  static AttentionRun of(const AttentionCase& c, double deviation = 1.0) {
    return {c, numbers<T>("qkv", c.queries() + 2 * c.keys(), deviation), numbers<T>("dout", c.queries())};
  }
  template <class U>
  std::vector<double> operator()(KernelTable<U>& k, Stream& s) const {
    Array<U> in(qkv, c.offset), from(dout, c.offset), gradient(qkv, c.offset);
    Array<U> y = Array<U>::poisoned(c.queries(), c.offset);
    if (on_array)
      for (Array<U>* const array : {&in, &from, &gradient, &y}) on_array(array->data(), array->count() * sizeof(U));
    Array<OpMath<U>> statistics(std::vector<double>(c.queries() / c.dim, NAN));
    const kernels::AttentionShape shape{c.batch, c.positions, c.heads, c.kv_heads, c.dim, c.scale, c.causal};
    const kernels::AttentionDropout dropout{c.dropout, dropout_stream(1, 2, "h.0.attn", 3)};
    const U* input = in.data();
    const std::size_t needed = std::max(k.attention_forward_scratch(shape), k.attention_backward_scratch(shape));
    Array<double> scratch(std::vector<double>(needed / sizeof(double) + 16, NAN));
    auto* aligned = reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(scratch.data()) + 63) / 64 * 64);
    k.attention_forward(
        s, {shape, part(input, 0), part(input, 1), part(input, 2),
            kernels::heads_view<U>(y.data(), c.positions, c.heads, c.dim), statistics.data(), aligned, dropout});
    kernels::AttentionBackward<U> back{shape, part(input, 0), part(input, 1), part(input, 2)};
    back.out = kernels::heads_view<const U>(y.data(), c.positions, c.heads, c.dim);
    back.dout = kernels::heads_view<const U>(from.data(), c.positions, c.heads, c.dim);
    back.log_sum_exp = statistics.data();
    back.dq = part(gradient.data(), 0), back.dk = part(gradient.data(), 1), back.dv = part(gradient.data(), 2);
    back.accumulate_dq = back.accumulate_dk = back.accumulate_dv = c.accumulate;
    back.scratch = aligned, back.dropout = dropout;
    k.attention_backward(s, back);
    return y.values() + statistics.values() + gradient.values();
  }
  /// The index of element 0 of a position and head of q, k or v.
  std::size_t at(std::size_t index, std::size_t position, std::size_t head) const {
    const auto view = part(static_cast<const double*>(qkv.data()), index);
    return static_cast<std::size_t>(view.data - qkv.data()) + position * view.position_stride + head * view.head_stride;
  }

  AttentionCase c;
  std::vector<double> qkv, dout;
  std::function<void(const void* begin, std::size_t bytes)> on_array;  ///< called with each operand and result; or null

 private:
  AttentionRun(const AttentionCase& shape, std::vector<double> inputs, std::vector<double> upstream)
      : c(shape), qkv(std::move(inputs)), dout(std::move(upstream)) {}
  template <class P>
  kernels::HeadsView<P> part(P* data, std::size_t index) const {
    if (c.fused) return kernels::fused_qkv_view<P>(data, index, c.positions, c.heads, c.dim);
    P* const begin = data + (index == 0 ? 0 : c.queries() + (index - 1) * c.keys());
    return kernels::heads_view<P>(begin, c.positions, index == 0 ? c.heads : c.kv_heads, c.dim);
  }
};

}  // namespace tessera::nn::test
