#include "tessera/nn/kernels/embedding.h"

#include <cstring>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/elementwise.h"
#include "tessera/nn/kernels/opmath.h"

namespace tessera::nn::kernels {
namespace {

void check_ids(const std::int32_t* ids, std::size_t rows, std::size_t vocabulary) {
  for (std::size_t row = 0; row < rows; ++row)
    if (ids[row] < 0 || static_cast<std::size_t>(ids[row]) >= vocabulary)
      throw base::InvalidUsage("embedding: id " + std::to_string(ids[row]) + " at position " + std::to_string(row) +
                               " is outside the table of " + std::to_string(vocabulary) + " rows");
}

template <class T>
void add_row(const T* x, T* y, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i)
    y[i] = static_cast<T>(static_cast<OpMath<T>>(y[i]) + static_cast<OpMath<T>>(x[i]));
}

}  // namespace

template <class T>
void embedding_forward(ThreadPool& pool, const EmbeddingForward<T>& args) {
  check_ids(args.ids, args.rows, args.vocabulary);
  const std::size_t tile = std::max<std::size_t>(1, kElementTile / std::max<std::size_t>(1, args.width));
  for_tiles(pool, args.rows, tile, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      const T* from = args.weight + static_cast<std::size_t>(args.ids[row]) * args.width;
      T* to = args.y + row * args.width;
      if (args.accumulate)
        add_row(from, to, args.width);
      else
        std::memcpy(to, from, args.width * sizeof(T));
    }
  });
}

template <class T>
void embedding_backward(ThreadPool& pool, const EmbeddingBackward<T>& args) {
  check_ids(args.ids, args.rows, args.vocabulary);
  if (!args.accumulate) fill<T>(pool, T(0), args.dweight, args.vocabulary * args.width);
  // Split by columns, so that the additions to each element follow the order of the rows on any thread.
  constexpr std::size_t kColumns = 64;
  for_tiles(pool, args.width, kColumns, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = 0; row < args.rows; ++row) {
      const std::size_t id = static_cast<std::size_t>(args.ids[row]);
      add_row(args.dy + row * args.width + begin, args.dweight + id * args.width + begin, end - begin);
    }
  });
}

template void embedding_forward<float>(ThreadPool&, const EmbeddingForward<float>&);
template void embedding_forward<double>(ThreadPool&, const EmbeddingForward<double>&);
template void embedding_forward<base::f16>(ThreadPool&, const EmbeddingForward<base::f16>&);
template void embedding_forward<base::bf16>(ThreadPool&, const EmbeddingForward<base::bf16>&);
template void embedding_backward<float>(ThreadPool&, const EmbeddingBackward<float>&);
template void embedding_backward<double>(ThreadPool&, const EmbeddingBackward<double>&);

}  // namespace tessera::nn::kernels
