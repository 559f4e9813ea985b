// Sums over a block of threads, in an order that depends only on the block size.
#pragma once

#include <array>

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/portable.cuh"

namespace tessera::nn::cuda {

// The order of blocks that add to the same numbers in global memory: a counter per group of numbers, at which the
// blocks wait for their turns, or by which the last block knows that it is the last. So sums have a fixed order and
// need no atomic additions.

#if defined(__CUDACC__)

/// Returns 0, 1, 2, ... in the order in which blocks begin. A block that waits only for blocks with lower numbers can't
/// deadlock: these have begun, and a block that has begun keeps its multiprocessor.
TESSERA_DEVICE std::uint32_t next_number(std::uint32_t* counter) { return atomicAdd(counter, 1U); }

/// As next_number(), by a block that has written for the one with the highest number: that block's calling thread, and
/// after a barrier the others, read what the blocks with lower numbers wrote.
TESSERA_DEVICE std::uint32_t arrive(std::uint32_t* counter) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(__cvta_generic_to_global(counter))
               : "memory");
  return before;
}

/// Waits until the counter is `turn`. What the block that set it had written is then visible to the caller, and after a
/// barrier to its block.
TESSERA_DEVICE void await_turn(const std::uint32_t* counter, std::uint32_t turn) {
  std::uint32_t now;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(__cvta_generic_to_global(counter)) : "memory");
  } while (now != turn);
}
/// Sets the counter after a barrier that follows the block's writes, which the barrier and the release order before it.
TESSERA_DEVICE void pass_turn(std::uint32_t* counter, std::uint32_t turn) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" : : "l"(__cvta_generic_to_global(counter)), "r"(turn) : "memory");
}

/// Reads and writes what other blocks write and read, past the first-level cache.
template <class T>
TESSERA_DEVICE T read_shared_sum(const T* from) {
  static_assert(sizeof(T) == sizeof(float4));
  return bits_as<T>(__ldcg(reinterpret_cast<const float4*>(from)));
}
template <class T>
TESSERA_DEVICE void write_shared_sum(T* to, const T& value) {
  static_assert(sizeof(T) == sizeof(float4));
  __stcg(reinterpret_cast<float4*>(to), bits_as<float4>(value));
}

#else

inline std::uint32_t next_number(std::uint32_t* counter) { return (*counter)++; }
inline std::uint32_t arrive(std::uint32_t* counter) { return (*counter)++; }
inline void await_turn(const std::uint32_t* counter, std::uint32_t turn) {
  if (*counter != turn)
    throw emulation::Failure("a block waits for turn " + std::to_string(turn) + " of a block that begins after it");
}
inline void pass_turn(std::uint32_t* counter, std::uint32_t turn) { *counter = turn; }
template <class T>
T read_shared_sum(const T* from) {
  return *from;
}
template <class T>
void write_shared_sum(T* to, const T& value) {
  *to = value;
}

#endif

struct Add {
  template <class W>
  TESSERA_DEVICE W operator()(W a, W b) const {
    return a + b;
  }
};
struct Largest {
  template <class W>
  TESSERA_DEVICE W operator()(W a, W b) const {
    return larger(a, b);
  }
};

/// Combines the lanes' values; returns the result in every lane. All lanes use the same tree since both operations
/// commute.
template <class W, class Operation>
TESSERA_DEVICE W over_warp(W value, Operation operation) {
  TESSERA_UNROLL
  for (unsigned mask = kWarp / 2; mask > 0; mask /= 2) value = operation(value, shuffle_xor(value, mask));
  return value;
}

/// Combines the threads' values; returns the result in every thread. `room`: 32 values of shared memory for exclusive
/// use during the call. All threads of the block must call it; the block consists of whole warps.
template <class W, class Operation>
TESSERA_DEVICE W over_block(W value, Operation operation, W* room) {
  value = over_warp(value, operation);
  const unsigned warp = thread_index() / kWarp, warps = thread_count() / kWarp;
  if (thread_index() % kWarp == 0) room[warp] = value;
  sync_block();
  W total = room[0];
  for (unsigned w = 1; w < warps; ++w) total = operation(total, room[w]);
  sync_block();
  return total;
}

/// Shared memory bytes of over_block.
template <class W>
inline constexpr std::size_t kReduceRoom = kWarp * sizeof(W);

/// Partial results of the infinity norm combine by the maximum, where NaN counts as the largest; those of other norms
/// by addition.
struct LargestOrNaN {
  TESSERA_DEVICE double operator()(double a, double b) const { return b > a || b != b ? b : a; }
};
template <class Operation>
TESSERA_DEVICE double over_threads(const double* in, std::size_t count, Operation operation) {
  double total = 0;
  for (std::size_t i = thread_index(); i < count; i += thread_count()) total = operation(total, in[i]);
  return over_block(total, operation, shared_memory<double>());
}

/// Adds one element to a partial result of a norm.
TESSERA_DEVICE double add_to_norm(kernels::Norm norm, double part, double value) {
  const double magnitude = value < 0 ? -value : value;
  switch (norm) {
    case kernels::Norm::one:
      return part + magnitude;
    case kernels::Norm::two:
      return fused(value, value, part);
    case kernels::Norm::three:
      return fused(value * value, magnitude, part);
    default:
      return LargestOrNaN{}(part, magnitude);
  }
}

/// Elements of a slice whose partial norm, in f64, a block computes.
inline constexpr std::size_t kNormTile = 16384;
/// At least one: an empty slice has a partial norm, too.
template <class T>
std::size_t norm_tiles(const NormParts<T>& a) {
  return larger(std::size_t{1}, divided_up(a.count, kNormTile));
}

/// The partial norm of a tile. A thread adds vectors of elements, also where `aligned` is false: no address shows in
/// the bits.
template <class T>
TESSERA_DEVICE double norm_of_tile(kernels::Norm norm, const T* x, std::size_t count, bool aligned) {
  constexpr int n = kVector<T>;
  double part = 0;
  for (std::size_t i = thread_index() * n; i < count; i += thread_count() * n) {
    const Pack<T, n> values = load_part<n>(x + i, aligned && i + n <= count, count - i);
    for (int e = 0; e < n; ++e) part = add_to_norm(norm, part, static_cast<double>(to_opmath(values.at[e])));
  }
  return norm == kernels::Norm::infinity ? over_block(part, LargestOrNaN{}, shared_memory<double>())
                                         : over_block(part, Add{}, shared_memory<double>());
}

/// Blocks = slices x tiles. The last block of a slice combines its tiles in their order, whichever block that is: each
/// thread combines every 256th, then the block. `parts`: [slices, tiles].
template <class T>
TESSERA_KERNEL void norm_kernel(NormParts<T> a, std::size_t tiles, bool aligned, double* parts) {
  const std::size_t slice = block_index() / tiles, tile = block_index() % tiles, begin = tile * kNormTile;
  const double part = norm_of_tile(a.norm, a.x + slice * a.count + begin, smaller(a.count - begin, kNormTile), aligned);
  if (tiles == 1) {
    if (thread_index() == 0) a.out[slice] = part;
    return;
  }
  parts += slice * tiles;
  std::uint32_t* const before = shared_memory<std::uint32_t>();  // blocks that came before this one
  if (thread_index() == 0) {
    parts[tile] = part;
    *before = arrive(a.counters + slice);
  }
  sync_block();
  const bool last = *before + 1 == tiles;
  sync_block();  // the sum writes where `before` is
  if (!last) return;
  const double total = a.norm == kernels::Norm::infinity ? over_threads(parts, tiles, LargestOrNaN{})
                                                         : over_threads(parts, tiles, Add{});
  if (thread_index() > 0) return;
  a.out[slice] = total;
  a.counters[slice] = 0;
}

template <class T>
std::size_t norm_scratch(const NormParts<T>& a) {
  return a.slices * norm_tiles(a) * sizeof(double);
}

/// `scratch`: norm_scratch(a) bytes.
template <class T>
void norm_parts(NativeStream stream, const NormParts<T>& a, double* scratch) {
  const bool vectors = aligned({a.x}) && (a.slices == 1 || a.count % kVector<T> == 0);
  launch(stream, {.blocks = a.slices * norm_tiles(a), .threads = 256, .shared = kReduceRoom<double>}, norm_kernel<T>, a,
         norm_tiles(a), vectors, scratch);
}

// Sums over the rows of a matrix, one for each column. Tiles of rows give partial sums, which are added in order, so
// the bits depend only on the shape.

/// Number of row tiles, each with `across` blocks side by side; it depends only on the shape. Few tiles make their sums
/// quick to add, two blocks for each multiprocessor of an H100 fill it where a block has the whole width, and twice as
/// many where it has a part of it.
inline std::size_t row_tiles(std::size_t rows, std::size_t across = 1) {
  const std::size_t most = across == 1 ? 264 : larger<std::size_t>(1, 528 / across);
  return smaller(divided_up(rows, 16), most);
}

inline constexpr unsigned kColumnThreads = 256;
inline constexpr unsigned kColumnWarps = kColumnThreads / kWarp;

/// Columns of a block, and its shared memory: each warp's sums.
template <class T>
inline constexpr std::size_t kColumnsOfBlock = kWarp* kVector<T>;
template <class T>
inline constexpr std::size_t kColumnRoom = kColumnWarps* kColumnsOfBlock<T> * sizeof(OpMath<T>);
/// Row tiles of column_parts.
template <class T>
std::size_t column_tiles(std::size_t rows, std::size_t columns) {
  return row_tiles(rows, divided_up(columns, kColumnsOfBlock<T>));
}
/// Bytes of the partial sums of `sums` values per column.
template <class T>
std::size_t column_scratch(std::size_t rows, std::size_t columns, std::size_t sums) {
  return sums * column_tiles<T>(rows, columns) * columns * sizeof(OpMath<T>);
}

/// parts[sum, tile, column] = the sums of Body over the tile's rows. A thread adds a vector of columns in every eighth
/// row. `aligned`: all rows begin at a multiple of 16 bytes.
template <class T, class Body>
TESSERA_KERNEL void column_parts_kernel(const Body body, std::size_t rows, std::size_t columns, std::size_t tiles,
                                        bool aligned, OpMath<T>* parts) {
  using W = OpMath<T>;
  constexpr int n = kVector<T>;
  W* room = shared_memory<W>();  // [warp, column]
  const std::size_t across = divided_up(columns, kColumnsOfBlock<T>);
  const std::size_t tile = block_index() / across, first = block_index() % across * kColumnsOfBlock<T>;
  const std::size_t warp = thread_index() / kWarp, place = thread_index() % kWarp * n, column = first + place;
  const std::size_t each = divided_up(rows, tiles), end = smaller(rows, (tile + 1) * each);
  W sums[Body::kSums][n] = {};
  if (aligned && column + n <= columns) {
    TESSERA_UNROLL_BY_8
    for (std::size_t row = tile * each + warp; row < end; row += kColumnWarps)
      body.add(
          row, row * columns + column, [](const T* from) { return load<n>(from); }, sums);
  } else if (column < columns) {
    const auto guarded = [&](const T* from) { return load_part<n>(from, false, columns - column); };
    for (std::size_t row = tile * each + warp; row < end; row += kColumnWarps)
      body.add(row, row * columns + column, guarded, sums);
  }
  for (std::size_t sum = 0; sum < Body::kSums; ++sum) {
    for (int e = 0; e < n; ++e) room[warp * kColumnsOfBlock<T> + place + e] = sums[sum][e];
    sync_block();
    for (std::size_t i = thread_index(); i < kColumnsOfBlock<T> && first + i < columns; i += kColumnThreads) {
      W total = room[i];
      for (std::size_t w = 1; w < kColumnWarps; ++w) total += room[w * kColumnsOfBlock<T> + i];
      parts[(sum * tiles + tile) * columns + first + i] = total;
    }
    sync_block();
  }
}

/// Where a column's sum goes; null: nowhere.
template <class T>
struct ColumnTarget {
  T* out;
  bool accumulate;
};

/// targets[sum].out[column] = or += the sum of parts[sum, tile, column] over the tiles. A warp adds every eighth tile,
/// then one warp adds the warps' sums in order.
template <class T>
TESSERA_KERNEL void combine_kernel(const OpMath<T>* parts, std::size_t tiles, std::size_t columns,
                                   ColumnTarget<T> first, ColumnTarget<T> second) {
  using W = OpMath<T>;
  W* room = shared_memory<W>();  // [warp, column]
  const std::size_t across = divided_up(columns, kWarp), sum = block_index() / across;
  const ColumnTarget<T> target = sum == 0 ? first : second;
  if (target.out == nullptr) return;
  const std::size_t warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const std::size_t column = block_index() % across * kWarp + lane;
  W part = 0;
  if (column < columns) {
    const W* from = parts + sum * tiles * columns + column;
    TESSERA_UNROLL_BY_8
    for (std::size_t tile = warp; tile < tiles; tile += kColumnWarps) part += from[tile * columns];
  }
  room[thread_index()] = part;
  sync_block();
  if (warp != 0 || column >= columns) return;
  W total = room[lane];
  for (std::size_t w = 1; w < kColumnWarps; ++w) total += room[w * kWarp + lane];
  target.out[column] = added(target.accumulate, target.out[column], total);
}

template <class T, class Body>
void column_parts(NativeStream stream, const Body& body, std::size_t rows, std::size_t columns, bool is_aligned,
                  OpMath<T>* scratch) {
  const std::size_t tiles = column_tiles<T>(rows, columns);
  launch(
      stream,
      {.blocks = tiles * divided_up(columns, kColumnsOfBlock<T>), .threads = kColumnThreads, .shared = kColumnRoom<T>},
      column_parts_kernel<T, Body>, body, rows, columns, tiles, is_aligned && columns % kVector<T> == 0, scratch);
}
template <class T>
void combine_columns(NativeStream stream, const OpMath<T>* parts, std::size_t tiles, std::size_t columns,
                     const std::array<ColumnTarget<T>, 2>& targets) {
  const std::size_t sums = targets[1].out != nullptr ? 2 : 1;
  launch(stream,
         {.blocks = sums * divided_up(columns, kWarp),
          .threads = kColumnThreads,
          .shared = kColumnThreads * sizeof(OpMath<T>)},
         combine_kernel<T>, parts, tiles, columns, targets[0], targets[1]);
}

/// The elements themselves: a bias gradient.
template <class T>
struct ColumnValues {
  static constexpr std::size_t kSums = 1;
  const T* x;
  template <class Load, int n>
  TESSERA_DEVICE void add(std::size_t, std::size_t at, const Load& load_from, OpMath<T> (&sums)[1][n]) const {
    const Pack<T, n> values = load_from(x + at);
    TESSERA_UNROLL
    for (int e = 0; e < n; ++e) sums[0][e] += to_opmath(values.at[e]);
  }
};

/// out[column] = or += the sum of x over the rows. `scratch`: column_scratch<T>(rows, columns, 1) bytes.
template <class T>
void column_sums(NativeStream stream, const kernels::ColumnSumsArgs<T>& a, OpMath<T>* scratch) {
  column_parts<T>(stream, ColumnValues<T>{a.x}, a.rows, a.columns, aligned({a.x}), scratch);
  combine_columns<T>(stream, scratch, column_tiles<T>(a.rows, a.columns), a.columns,
                     {ColumnTarget<T>{a.out, a.accumulate}, ColumnTarget<T>{}});
}

}  // namespace tessera::nn::cuda
