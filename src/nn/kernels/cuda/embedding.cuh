// Rows of an embedding table, and rotary positions.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/kernel_table.h"

namespace tessera::nn::cuda {

// A stable sort of rows by their ids, in passes over digits of 8 bits from the lowest. Each block counts the digits of
// one tile of rows; then each block finds where the rows of its tile go from the counts of all tiles. There are no
// atomic operations, so the result is always the same.

/// A row number, and above it the row's key: its id, or the size of the vocabulary for an id outside of it.
using KeyedRow = std::uint64_t;
TESSERA_DEVICE std::uint32_t key_of(KeyedRow row) { return static_cast<std::uint32_t>(row >> 32); }
TESSERA_DEVICE std::size_t row_of(KeyedRow row) { return static_cast<std::uint32_t>(row); }

inline constexpr unsigned kDigits = 256;  // values of a digit, and threads of a block
inline constexpr unsigned kSortEach = 4;  // rows of a thread
inline constexpr unsigned kSortWarps = kDigits / kWarp;
inline constexpr std::size_t kSortTile = kDigits * kSortEach;

struct SortPass {
  const std::int32_t* ids = nullptr;  ///< input of the first pass; null: `from`
  const KeyedRow* from = nullptr;
  KeyedRow* to = nullptr;
  std::uint32_t* counts = nullptr;  ///< [tiles, kDigits]
  std::size_t rows = 0, vocabulary = 0;
  unsigned shift = 32;  ///< of the digit
};

/// Rows of a thread, with their places among the rows of the warp that have the same digit.
struct RankedRows {
  KeyedRow row[kSortEach];
  unsigned digit[kSortEach];  ///< kDigits: there is no row
  std::uint32_t rank[kSortEach];
};

/// counts[warp, digit] = how many rows of the warp have the digit, in shared memory. A warp's rows are adjacent.
TESSERA_DEVICE RankedRows rank_rows(const SortPass& pass, std::uint32_t* counts) {
  for (unsigned i = thread_index(); i < kSortWarps * kDigits; i += thread_count()) counts[i] = 0;
  sync_block();
  const unsigned warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  std::uint32_t* mine = counts + warp * kDigits;
  RankedRows ranked;
  TESSERA_UNROLL
  for (unsigned e = 0; e < kSortEach; ++e) {
    const std::size_t i = block_index() * kSortTile + (warp * kSortEach + e) * kWarp + lane;
    const bool exists = i < pass.rows;
    KeyedRow row = 0;
    if (exists && pass.ids != nullptr) {
      const std::int32_t id = pass.ids[i];
      const bool known = id >= 0 && static_cast<std::size_t>(id) < pass.vocabulary;
      row = (known ? static_cast<KeyedRow>(id) : static_cast<KeyedRow>(pass.vocabulary)) << 32 | i;
    } else if (exists) {
      row = pass.from[i];
    }
    const unsigned digit = exists ? static_cast<unsigned>(row >> pass.shift) % kDigits : kDigits;
    const unsigned same = lanes_with(digit), before = same & ((1U << lane) - 1);
    ranked.row[e] = row;
    ranked.digit[e] = digit;
    ranked.rank[e] = exists ? mine[digit] + bits_set(before) : 0;
    sync_warp();
    if (exists && before == 0) mine[digit] += bits_set(same);
    sync_warp();
  }
  sync_block();
  return ranked;
}

TESSERA_PLAIN_KERNEL void count_digits_kernel(SortPass pass) {
  std::uint32_t* counts = shared_memory<std::uint32_t>();
  rank_rows(pass, counts);
  const unsigned digit = thread_index();
  std::uint32_t sum = 0;
  for (unsigned warp = 0; warp < kSortWarps; ++warp) sum += counts[warp * kDigits + digit];
  pass.counts[block_index() * kDigits + digit] = sum;
}

/// The sum of the values of all threads before this one. `room`: thread_count() values of shared memory.
TESSERA_DEVICE std::uint32_t sum_before(std::uint32_t value, std::uint32_t* room) {
  const unsigned thread = thread_index();
  room[thread] = value;
  sync_block();
  for (unsigned step = 1; step < thread_count(); step *= 2) {
    const std::uint32_t other = thread >= step ? room[thread - step] : 0;
    sync_block();
    room[thread] += other;
    sync_block();
  }
  return room[thread] - value;
}

TESSERA_PLAIN_KERNEL void place_rows_kernel(SortPass pass) {
  std::uint32_t* counts = shared_memory<std::uint32_t>();
  const RankedRows ranked = rank_rows(pass, counts);
  const unsigned digit = thread_index();
  std::uint32_t total = 0, before = 0;  // with this digit: in all tiles, and in those before this one
  for (std::size_t tile = 0; tile < block_count(); ++tile) {
    const std::uint32_t count = pass.counts[tile * kDigits + digit];
    total += count;
    before += tile < block_index() ? count : 0;
  }
  std::uint32_t place = before + sum_before(total, counts + kSortWarps * kDigits);
  for (unsigned warp = 0; warp < kSortWarps; ++warp) {
    const std::uint32_t count = counts[warp * kDigits + digit];
    counts[warp * kDigits + digit] = place;
    place += count;
  }
  sync_block();
  const std::uint32_t* mine = counts + thread_index() / kWarp * kDigits;
  TESSERA_UNROLL
  for (unsigned e = 0; e < kSortEach; ++e)
    if (ranked.digit[e] < kDigits) pass.to[mine[ranked.digit[e]] + ranked.rank[e]] = ranked.row[e];
}

inline std::size_t sort_scratch(std::size_t rows) {
  return 2 * rows * sizeof(KeyedRow) + divided_up(rows, kSortTile) * kDigits * sizeof(std::uint32_t);
}

/// Returns the rows in the order of their ids, those of one id in their own order. `scratch`: sort_scratch(rows) bytes,
/// which hold the result.
inline const KeyedRow* sort_rows(NativeStream stream, const std::int32_t* ids, std::size_t rows, std::size_t vocabulary,
                                 void* scratch) {
  auto* to = static_cast<KeyedRow*>(scratch);
  KeyedRow* from = to + rows;
  SortPass pass{
      .ids = ids, .counts = reinterpret_cast<std::uint32_t*>(from + rows), .rows = rows, .vocabulary = vocabulary};
  const Grid grid{.blocks = divided_up(rows, kSortTile),
                  .threads = kDigits,
                  .shared = (kSortWarps + 1) * kDigits * sizeof(std::uint32_t)};
  for (std::size_t keys = vocabulary; keys > 0; keys /= kDigits) {  // keys are 0 to vocabulary
    pass.from = from, pass.to = to;
    launch(stream, grid, count_digits_kernel, pass);
    launch(stream, grid, place_rows_kernel, pass);
    from = to, to = const_cast<KeyedRow*>(pass.from);
    pass.ids = nullptr, pass.shift += 8;
  }
  return from;
}

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

// The gradient of an embedding table: rows of dy are sorted by id, pieces of the sorted sequence are added up, and the
// sums of ids that lie in several pieces are combined. All sums have an order that depends on the ids alone, and no
// thread adds more than a piece, or an eighth of an id's pieces, however often an id occurs.

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
