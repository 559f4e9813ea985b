// The gradient of an embedding table: rows of dy are sorted by id, pieces of the sorted sequence are added up, and the
// sums of ids that lie in several pieces are combined. All sums have an order that depends on the ids alone, and no
// thread adds more than a piece, or an eighth of an id's pieces, however often an id occurs.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/cuda/sort_rows.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

inline constexpr std::size_t kPiece = 16;       // sorted rows
inline constexpr unsigned kPieceThreads = 128;  // each adds up one vector
inline constexpr unsigned kPieceAhead = 4;      // vectors that a thread loads before it adds the first
inline constexpr std::uint32_t kNoKey = ~0U;    // beyond both ends of the sequence
inline constexpr unsigned kCombineWarps = 8;    // each adds up a part of an id's pieces

/// Sums of the ids that go beyond a piece, [pieces, 2, stride]: of the one that began before the piece, and of the one
/// that begins in it and goes on in the next.
template <class T>
struct PieceSums {
  static constexpr std::size_t kColumns = kVector<OpMath<T>>;  // of a vector
  OpMath<T>* data;
  std::size_t stride;
  TESSERA_DEVICE OpMath<T>* begun_before(std::size_t piece) const { return data + 2 * piece * stride; }
  TESSERA_DEVICE OpMath<T>* goes_on(std::size_t piece) const { return data + (2 * piece + 1) * stride; }
};

/// A piece of the sorted sequence, with the keys around it.
struct Piece {
  std::size_t begin, end;
  std::uint32_t key_before, key_after;
};
TESSERA_DEVICE Piece piece_at(std::size_t index, const KeyedRow* sorted, std::size_t rows) {
  const std::size_t begin = index * kPiece, end = smaller(rows, begin + kPiece);
  return {begin, end, begin > 0 ? key_of(sorted[begin - 1]) : kNoKey, end < rows ? key_of(sorted[end]) : kNoKey};
}

/// Stores the sums of n columns of one id in a piece: in the table if the id lies in this piece alone.
template <class T, int n>
TESSERA_DEVICE void store_sums(const kernels::EmbeddingBackward<T>& a, const PieceSums<T>& sums, const Piece& piece,
                               std::uint32_t key, std::size_t column, const Pack<OpMath<T>, n>& sum) {
  if (key >= a.vocabulary) return;
  const std::size_t index = piece.begin / kPiece;
  const bool begun_before = key == piece.key_before;
  if (begun_before || key == piece.key_after) {
    store<n>((begun_before ? sums.begun_before(index) : sums.goes_on(index)) + column, sum);
    return;
  }
  T* to = a.dweight + key * a.width + column;
  Pack<T, n> result{};
  if (a.accumulate) result = load<n>(static_cast<const T*>(to));
  TESSERA_UNROLL
  for (int e = 0; e < n; ++e) result.at[e] = added(a.accumulate, result.at[e], sum.at[e]);
  store<n>(to, result);
}

/// Blocks = pieces x groups of columns.
template <class T, int n>
TESSERA_KERNEL void embedding_pieces_kernel(kernels::EmbeddingBackward<T> a, const KeyedRow* sorted,
                                            PieceSums<T> sums) {
  const std::size_t across = divided_up(a.width, std::size_t{kPieceThreads} * n);
  const std::size_t column = (block_index() % across * kPieceThreads + thread_index()) * n;
  if (column >= a.width) return;
  const Piece piece = piece_at(block_index() / across, sorted, a.rows);
  Pack<OpMath<T>, n> sum{};
  std::uint32_t key = key_of(sorted[piece.begin]);
  for (std::size_t first = piece.begin; first < piece.end; first += kPieceAhead) {
    std::uint32_t keys[kPieceAhead];
    Pack<T, n> in[kPieceAhead];
    TESSERA_UNROLL
    for (unsigned r = 0; r < kPieceAhead; ++r) {
      if (first + r >= piece.end) continue;
      const KeyedRow row = sorted[first + r];
      keys[r] = key_of(row);
      in[r] = load<n>(a.dy + row_of(row) * a.width + column);
    }
    TESSERA_UNROLL
    for (unsigned r = 0; r < kPieceAhead; ++r) {
      if (first + r >= piece.end) continue;
      if (keys[r] != key) {
        store_sums<T, n>(a, sums, piece, key, column, sum);
        key = keys[r];
        sum = {};
      }
      TESSERA_UNROLL
      for (int e = 0; e < n; ++e) sum.at[e] += to_opmath(in[r].at[e]);
    }
  }
  store_sums<T, n>(a, sums, piece, key, column, sum);
}

/// The number of pieces after `piece` in which `key` begun before goes on, counted by all threads of the block.
TESSERA_DEVICE std::size_t pieces_after(std::size_t piece, std::uint32_t key, const KeyedRow* sorted,
                                        std::size_t rows) {
  std::size_t count = 0;
  for (;;) {
    const std::size_t next = (piece + 1 + count + thread_index()) * kPiece;
    const unsigned goes_on = next < rows && key_of(sorted[next]) == key ? 1 : 0;
    const unsigned found = over_block(goes_on, Add{}, shared_memory<unsigned>());
    count += found;
    if (found < thread_count()) return count;
  }
}

/// Combines the sums of the id that begins in a piece and goes on in others. Blocks = pieces x groups of columns.
template <class T>
TESSERA_KERNEL void embedding_combine_kernel(kernels::EmbeddingBackward<T> a, const KeyedRow* sorted,
                                             PieceSums<T> sums) {
  using W = OpMath<T>;
  constexpr unsigned n = PieceSums<T>::kColumns, kColumns = kWarp * n;
  const std::size_t across = divided_up(a.width, kColumns), index = block_index() / across;
  const Piece piece = piece_at(index, sorted, a.rows);
  const std::uint32_t key = key_of(sorted[piece.end - 1]);
  if (key >= a.vocabulary || key != piece.key_after || key == piece.key_before) return;  // the same for the whole block
  const std::size_t parts = 1 + pieces_after(index, key, sorted, a.rows), each = divided_up(parts, kCombineWarps);
  const unsigned warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const std::size_t first_column = block_index() % across * kColumns, column = first_column + lane * n;
  const auto part_at = [&](std::size_t i) { return i == 0 ? sums.goes_on(index) : sums.begun_before(index + i); };
  Pack<W, n> sum{};
  if (column < sums.stride) {
    const std::size_t end = smaller(parts, (warp + 1) * each);
    for (std::size_t first = warp * each; first < end; first += kPieceAhead) {
      Pack<W, n> part[kPieceAhead];
      TESSERA_UNROLL
      for (unsigned r = 0; r < kPieceAhead; ++r)
        if (first + r < end) part[r] = load<n>(static_cast<const W*>(part_at(first + r)) + column);
      TESSERA_UNROLL
      for (unsigned r = 0; r < kPieceAhead; ++r)
        for (unsigned e = 0; e < n; ++e) sum.at[e] += first + r < end ? part[r].at[e] : W(0);
    }
  }
  W* room = shared_memory<W>();  // [kCombineWarps, kColumns]
  for (unsigned e = 0; e < n; ++e) room[warp * kColumns + lane * n + e] = sum.at[e];
  sync_block();
  for (unsigned i = thread_index(); i < kColumns && first_column + i < a.width; i += thread_count()) {
    W total = 0;
    for (unsigned w = 0; w < kCombineWarps; ++w) total += room[w * kColumns + i];
    T& to = a.dweight[key * a.width + first_column + i];
    to = added(a.accumulate, to, total);
  }
}

template <class T>
std::size_t piece_stride(std::size_t width) {
  return divided_up(width, PieceSums<T>::kColumns) * PieceSums<T>::kColumns;
}
template <class T>
std::size_t embedding_scratch(std::size_t rows, std::size_t width) {
  return 2 * divided_up(rows, kPiece) * piece_stride<T>(width) * sizeof(OpMath<T>) + sort_scratch(rows);
}

/// `scratch`: embedding_scratch<T>(rows, width) bytes.
template <class T>
void embedding_backward(NativeStream stream, const kernels::EmbeddingBackward<T>& a, void* scratch) {
  const std::size_t table = a.vocabulary * a.width, pieces = divided_up(a.rows, kPiece);
  if (!a.accumulate) for_elements<kVector<T>>(stream, table, {a.dweight}, FillBody<T>{T(0.0F), a.dweight});
  if (table == 0) return;
  const PieceSums<T> sums{static_cast<OpMath<T>*>(scratch), piece_stride<T>(a.width)};
  const KeyedRow* sorted = sort_rows(stream, a.ids, a.rows, a.vocabulary, sums.data + 2 * pieces * sums.stride);
  const bool wide = aligned({a.dy, a.dweight}) && a.width % kVector<T> == 0;
  const std::size_t across = divided_up(a.width, kPieceThreads * (wide ? std::size_t{kVector<T>} : 1));
  launch(stream, {.blocks = pieces * across, .threads = kPieceThreads},
         wide ? embedding_pieces_kernel<T, kVector<T>> : embedding_pieces_kernel<T, 1>, a, sorted, sums);
  constexpr std::size_t kColumns = kWarp * PieceSums<T>::kColumns;
  launch(stream,
         {.blocks = pieces * divided_up(a.width, kColumns),
          .threads = kCombineWarps * kWarp,
          .shared = kCombineWarps * kColumns * sizeof(OpMath<T>)},
         embedding_combine_kernel<T>, a, sorted, sums);
}

}  // namespace tessera::nn::cuda
