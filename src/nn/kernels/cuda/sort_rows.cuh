// A stable sort of rows by their ids, in passes over digits of 8 bits from the lowest. Each block counts the digits of
// one tile of rows; then each block finds where the rows of its tile go from the counts of all tiles. There are no
// atomic operations, so the result is always the same.
#pragma once

#include "tessera/nn/kernels/cuda/portable.cuh"

namespace tessera::nn::cuda {

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

}  // namespace tessera::nn::cuda
