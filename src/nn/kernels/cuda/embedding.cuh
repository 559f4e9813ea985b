// Embedding, whose backward sums in a fixed order, and rotary positions.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

/// One block per row of ids. An id outside the table yields a row of NaN, because the host can't detect it in time to
/// throw.
template <class T>
TESSERA_KERNEL void embedding_kernel(kernels::EmbeddingForward<T> a) {
  using W = OpMath<T>;
  const std::size_t row = block_index();
  const std::int32_t id = a.ids[row];
  const bool known = id >= 0 && static_cast<std::size_t>(id) < a.vocabulary;
  const T* from = a.weight + (known ? static_cast<std::size_t>(id) * a.width : 0);
  T* to = a.y + row * a.width;
  for (std::size_t i = thread_index(); i < a.width; i += thread_count()) {
    const W value = known ? to_opmath(from[i]) : not_a_number(W(0));
    to[i] = from_opmath<T>(a.accumulate ? to_opmath(to[i]) + value : value);
  }
}
template <class T>
void embedding_forward(NativeStream stream, const kernels::EmbeddingForward<T>& a) {
  launch(stream, {.blocks = a.rows, .threads = 128}, embedding_kernel<T>, a);
}

// The backward needs the rows of each id in order. A counting sort finds them: a histogram whose blocks each own a
// range of ids (so no atomics are needed), its exclusive prefix sum, and a second pass that writes the row numbers.

/// Ids per block of the index kernels.
inline constexpr std::size_t kIdsOfBlock = 256;

/// counts[id] = the number of rows with this id; one thread per id, with the ids staged in shared memory.
TESSERA_PLAIN_KERNEL void count_ids_kernel(const std::int32_t* ids, std::size_t rows, std::size_t vocabulary,
                                           std::uint32_t* counts) {
  std::int32_t* part = shared_memory<std::int32_t>();
  const std::size_t id = block_index() * thread_count() + thread_index();
  std::uint32_t count = 0;
  for (std::size_t first = 0; first < rows; first += thread_count()) {
    if (first + thread_index() < rows) part[thread_index()] = ids[first + thread_index()];
    sync_block();
    const std::size_t n = smaller<std::size_t>(thread_count(), rows - first);
    for (std::size_t i = 0; i < n; ++i) count += part[i] == static_cast<std::int32_t>(id) ? 1U : 0U;
    sync_block();
  }
  if (id < vocabulary) counts[id] = count;
}

/// starts[id] = the sum of the counts before it; one block, one range per thread.
TESSERA_PLAIN_KERNEL void start_ids_kernel(const std::uint32_t* counts, std::size_t vocabulary, std::uint32_t* starts) {
  std::uint32_t* sums = shared_memory<std::uint32_t>();
  const std::size_t each = divided_up(vocabulary, thread_count());
  const std::size_t begin = smaller(vocabulary, thread_index() * each), end = smaller(vocabulary, begin + each);
  std::uint32_t sum = 0;
  for (std::size_t i = begin; i < end; ++i) sum += counts[i];
  sums[thread_index()] = sum;
  sync_block();
  std::uint32_t start = 0;
  for (unsigned t = 0; t < thread_index(); ++t) start += sums[t];
  for (std::size_t i = begin; i < end; ++i) {
    starts[i] = start;
    start += counts[i];
  }
}

/// rows_of[starts[id] ..] = the rows with this id, in order.
TESSERA_PLAIN_KERNEL void list_ids_kernel(const std::int32_t* ids, std::size_t rows, std::size_t vocabulary,
                                          const std::uint32_t* starts, std::uint32_t* rows_of) {
  std::int32_t* part = shared_memory<std::int32_t>();
  const std::size_t id = block_index() * thread_count() + thread_index();
  std::uint32_t at = id < vocabulary ? starts[id] : 0;
  for (std::size_t first = 0; first < rows; first += thread_count()) {
    if (first + thread_index() < rows) part[thread_index()] = ids[first + thread_index()];
    sync_block();
    const std::size_t n = smaller<std::size_t>(thread_count(), rows - first);
    for (std::size_t i = 0; i < n; ++i)
      if (id < vocabulary && part[i] == static_cast<std::int32_t>(id))
        rows_of[at++] = static_cast<std::uint32_t>(first + i);
    sync_block();
  }
}

/// dweight[id] = or += the sum of its rows of dy, in order; one block per id.
template <class T>
TESSERA_KERNEL void embedding_backward_kernel(kernels::EmbeddingBackward<T> a, const std::uint32_t* counts,
                                              const std::uint32_t* starts, const std::uint32_t* rows_of) {
  using W = OpMath<T>;
  const std::size_t id = block_index();
  const std::uint32_t count = counts[id];
  if (count == 0 && a.accumulate) return;
  const std::uint32_t* rows = rows_of + starts[id];
  T* to = a.dweight + id * a.width;
  for (std::size_t i = thread_index(); i < a.width; i += thread_count()) {
    W sum = a.accumulate ? to_opmath(to[i]) : W(0);
    for (std::uint32_t r = 0; r < count; ++r) sum += to_opmath(a.dy[rows[r] * a.width + i]);
    to[i] = from_opmath<T>(sum);
  }
}

inline std::size_t embedding_scratch(std::size_t rows, std::size_t vocabulary) {
  return (2 * vocabulary + rows) * sizeof(std::uint32_t);
}

/// `scratch`: embedding_scratch(rows, vocabulary) bytes.
template <class T>
void embedding_backward(NativeStream stream, const kernels::EmbeddingBackward<T>& a, std::uint32_t* scratch) {
  std::uint32_t* counts = scratch;
  std::uint32_t* starts = counts + a.vocabulary;
  std::uint32_t* rows_of = starts + a.vocabulary;
  const Grid per_id{.blocks = divided_up(a.vocabulary, kIdsOfBlock),
                    .threads = kIdsOfBlock,
                    .shared = kIdsOfBlock * sizeof(std::int32_t)};
  launch(stream, per_id, count_ids_kernel, a.ids, a.rows, a.vocabulary, counts);
  launch(stream, {.blocks = 1, .threads = 1024, .shared = 1024 * sizeof(std::uint32_t)}, start_ids_kernel,
         static_cast<const std::uint32_t*>(counts), a.vocabulary, starts);
  launch(stream, per_id, list_ids_kernel, a.ids, a.rows, a.vocabulary, static_cast<const std::uint32_t*>(starts),
         rows_of);
  launch(stream, {.blocks = a.vocabulary, .threads = 128}, embedding_backward_kernel<T>, a,
         static_cast<const std::uint32_t*>(counts), static_cast<const std::uint32_t*>(starts),
         static_cast<const std::uint32_t*>(rows_of));
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
