// Rows of an embedding table, and rotary positions.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

/// One block per row of ids. An id outside the table yields a row of NaN, because the host can't detect it in time to
/// throw.
template <class T, int n>
TESSERA_KERNEL void embedding_kernel(kernels::EmbeddingForward<T> a) {
  const std::size_t row = block_index();
  const std::int32_t id = a.ids[row];
  const bool known = id >= 0 && static_cast<std::size_t>(id) < a.vocabulary;
  const T* from = a.weight + (known ? static_cast<std::size_t>(id) * a.width : 0);
  T* to = a.y + row * a.width;
  const T unknown = from_opmath<T>(not_a_number(OpMath<T>(0)));
  for (std::size_t i = thread_index() * n; i < a.width; i += thread_count() * n) {
    Pack<T, n> value = load<n>(from + i);
    if (a.accumulate) {
      const Pack<T, n> before = load<n>(static_cast<const T*>(to) + i);
      TESSERA_UNROLL
      for (int e = 0; e < n; ++e) value.at[e] = added(true, before.at[e], to_opmath(value.at[e]));
    }
    TESSERA_UNROLL
    for (int e = 0; e < n; ++e) value.at[e] = known ? value.at[e] : unknown;
    store<n>(to + i, value);
  }
}
template <class T>
void embedding_forward(NativeStream stream, const kernels::EmbeddingForward<T>& a) {
  const bool wide = aligned({a.weight, a.y}) && a.width % kVector<T> == 0;
  launch(stream, {.blocks = a.rows, .threads = 128}, wide ? embedding_kernel<T, kVector<T>> : embedding_kernel<T, 1>,
         a);
}

/// One block per row of the batch, one thread per pair of elements.
template <class T>
TESSERA_KERNEL void rope_kernel(kernels::RopeArgs<T> a) {
  using W = OpMath<T>;
  const std::size_t b = block_index() / a.positions, position = block_index() % a.positions, half = a.dim / 2;
  const T* in = a.in.data + b * a.in.batch_stride + position * a.in.position_stride;
  T* out = a.out.data + b * a.out.batch_stride + position * a.out.position_stride;
  for (std::size_t pair = thread_index(); pair < a.heads * half; pair += thread_count()) {
    const std::size_t head = pair / half, i = pair % half;
    const W cosine = a.cosine[position * half + i],
            sine = a.inverse ? -a.sine[position * half + i] : a.sine[position * half + i];
    const W x = to_opmath(in[head * a.in.head_stride + i]), y = to_opmath(in[head * a.in.head_stride + i + half]);
    T* first = out + head * a.out.head_stride + i;
    T* second = first + half;
    *first = added(a.accumulate, *first, x * cosine - y * sine);
    *second = added(a.accumulate, *second, y * cosine + x * sine);
  }
}
template <class T>
void rope(NativeStream stream, const kernels::RopeArgs<T>& a) {
  if (a.dim % 2 != 0)
    throw base::InvalidUsage("rope: head dimension " + std::to_string(a.dim) + " is odd, needs pairs");
  launch(stream, {.blocks = a.batch * a.positions, .threads = 128}, rope_kernel<T>, a);
}

}  // namespace tessera::nn::cuda
