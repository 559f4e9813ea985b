#include "tessera/nn/kernels/cpu/products.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "tessera/base/half_loops-inl.h"
#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/own_product.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_OWN_PRODUCT_ONCE
#define TESSERA_NN_KERNELS_OWN_PRODUCT_ONCE
namespace tessera::nn::kernels {

/// Extents of the packed blocks: one of A stays in the second cache level, one panel of B in the first.
constexpr std::size_t kBlockRows = 144, kBlockColumns = 768, kBlockDepth = 256;
/// Rows of C whose sums a half-precision product keeps in f32 at once.
constexpr std::size_t kSumRows = 576;

/// The packed blocks of one thread.
template <class T>
struct ProductBlocks {
  T* a = nullptr;     ///< [panel of rows][depth][kRows]
  T* b = nullptr;     ///< [panel of columns][depth][kColumns]
  T* sums = nullptr;  ///< [kSumRows, kBlockColumns], for half precision
};

template <class T>
struct OwnProductTable {
  void (*multiply)(const GemmArgs<T>& g, const T* bias, const ProductBlocks<OpMath<T>>& blocks);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

// The part of C that the innermost loop keeps in registers: kRows x kVectors sums, kVectors of B and one factor of A
// fit in 32 registers (AVX-512, NEON) or 16 (AVX2).
#if HWY_TARGET == HWY_AVX3
constexpr std::size_t kRows = 12, kVectors = 2;
#elif HWY_ARCH_ARM_A64
constexpr std::size_t kRows = 8, kVectors = 3;
#elif HWY_TARGET == HWY_SCALAR
constexpr std::size_t kRows = 4, kVectors = 2;
#else
constexpr std::size_t kRows = 4, kVectors = 3;
#endif
template <class T>
constexpr std::size_t kColumns = kVectors* kLanes<T>;

static_assert(kBlockRows % kRows == 0 && kSumRows % kBlockRows == 0 && kBlockColumns % kColumns<float> == 0);

/// A matrix whose rows or columns are contiguous: element (i, l) is data[i * i_stride + l * l_stride].
template <class In>
struct Operand {
  const In* data;
  std::size_t i_stride, l_stride;
};

/// The value as f32 or f64; exact.
template <class T, class In>
HWY_INLINE T widened(In value) {
  if constexpr (std::is_same_v<In, T>)
    return value;
  else
    return base::to_float(value);
}

/// `count` contiguous elements as f32 or f64: in place, or converted into `room`.
template <class In, class T>
HWY_INLINE const T* widened(const In* from, std::size_t count, T* room) {
  if constexpr (std::is_same_v<In, T>) {
    return from;
  } else {
    for (std::size_t i = 0; i < count; ++i) room[i] = base::to_float(from[i]);
    return room;
  }
}

/// out[l * stride + q] = row[q][l] for q < kCount.
template <std::size_t kCount, class T>
HWY_INLINE void transpose(const T* const (&row)[4], std::size_t count, T* out, std::size_t stride) {
  std::size_t l = 0;
#if HWY_TARGET != HWY_SCALAR
  if constexpr (sizeof(T) == 4 && kCount == 4) {
    const hn::FixedTag<T, 4> d;
    for (; l + 4 <= count; l += 4) {
      const auto r0 = hn::LoadU(d, row[0] + l), r1 = hn::LoadU(d, row[1] + l);
      const auto r2 = hn::LoadU(d, row[2] + l), r3 = hn::LoadU(d, row[3] + l);
      const auto low01 = hn::InterleaveLower(d, r0, r1), low23 = hn::InterleaveLower(d, r2, r3);
      const auto high01 = hn::InterleaveUpper(d, r0, r1), high23 = hn::InterleaveUpper(d, r2, r3);
      hn::StoreU(hn::ConcatLowerLower(d, low23, low01), d, out + l * stride);
      hn::StoreU(hn::ConcatUpperUpper(d, low23, low01), d, out + (l + 1) * stride);
      hn::StoreU(hn::ConcatLowerLower(d, high23, high01), d, out + (l + 2) * stride);
      hn::StoreU(hn::ConcatUpperUpper(d, high23, high01), d, out + (l + 3) * stride);
    }
  }
#endif
  for (; l < count; ++l)
    for (std::size_t q = 0; q < kCount; ++q) out[l * stride + q] = row[q][l];
}

/// One panel of kWidth rows of A (or columns of B): out[l * kWidth + i] = in(i, l), 0 for i >= count.
template <std::size_t kWidth, class In, class T>
HWY_INLINE void pack_panel(const Operand<In>& in, std::size_t count, std::size_t depth, T* out) {
  if (in.i_stride == 1) {
    for (std::size_t l = 0; l < depth; ++l, out += kWidth) {
      const In* const from = in.data + l * in.l_stride;
      if (count == kWidth) {
        for (std::size_t i = 0; i < kWidth; ++i) out[i] = widened<T>(from[i]);
      } else {
        // In two loops: one becomes masked loads beyond the row, which emulators of the processor do not all support.
        for (std::size_t i = 0; i < count; ++i) out[i] = widened<T>(from[i]);
        std::fill(out + count, out + kWidth, T(0));
      }
    }
    return;
  }
  constexpr std::size_t kPart = 64;
  static constexpr T kZeros[kPart] = {};
  alignas(64) T room[4][kPart];
  for (std::size_t at = 0; at < depth; at += kPart) {
    const std::size_t part = std::min(kPart, depth - at);
    for (std::size_t i = 0; i < kWidth; i += 4) {
      const T* row[4];
      for (std::size_t q = 0; q < 4; ++q)
        row[q] = i + q < count ? widened(in.data + (i + q) * in.i_stride + at, part, room[q]) : kZeros;
      if (i + 4 <= kWidth)
        transpose<4>(row, part, out + at * kWidth + i, kWidth);
      else
        transpose<kWidth % 4>(row, part, out + at * kWidth + i, kWidth);
    }
  }
}

/// All panels of a block.
template <std::size_t kWidth, class In, class T>
HWY_INLINE void pack(Operand<In> in, std::size_t count, std::size_t depth, T* out) {
  for (std::size_t i = 0; i < count; i += kWidth, out += kWidth * depth, in.data += kWidth * in.i_stride)
    pack_panel<kWidth>(in, std::min(kWidth, count - i), depth, out);
}

/// Where the sums of a register tile begin: rows `stride` apart; null: zero.
template <class T>
struct Start {
  const T* data;
  std::size_t stride;
};

/// kRows x kColumns sums over packed panels of A and B.
template <class T>
HWY_INLINE void multiply_panels(std::size_t depth, const T* HWY_RESTRICT a, const T* HWY_RESTRICT b, Start<T> start,
                                T* c, std::size_t c_row) {
  Vec<T> sum[kRows][kVectors];
  HWY_UNROLL(12)
  for (std::size_t r = 0; r < kRows; ++r) HWY_UNROLL(3)
  for (std::size_t v = 0; v < kVectors; ++v)
    sum[r][v] = start.data == nullptr ? hn::Zero(Tag<T>()) : load<T>(start.data + r * start.stride + v * kLanes<T>);
  for (std::size_t l = 0; l < depth; ++l, a += kRows, b += kColumns<T>) {
    Vec<T> line[kVectors];
    HWY_UNROLL(3)
    for (std::size_t v = 0; v < kVectors; ++v) line[v] = hn::Load(Tag<T>(), b + v * kLanes<T>);
    HWY_UNROLL(12)
    for (std::size_t r = 0; r < kRows; ++r) {
      const Vec<T> factor = hn::Set(Tag<T>(), a[r]);
      HWY_UNROLL(3)
      for (std::size_t v = 0; v < kVectors; ++v) sum[r][v] = mul_add<T>(factor, line[v], sum[r][v]);
    }
  }
  HWY_UNROLL(12)
  for (std::size_t r = 0; r < kRows; ++r) HWY_UNROLL(3)
  for (std::size_t v = 0; v < kVectors; ++v) store<T>(sum[r][v], c + r * c_row + v * kLanes<T>);
}

/// The same for a tile at the edge of C, of rows x columns.
template <class T>
void multiply_edge(std::size_t depth, const T* a, const T* b, Start<T> start, T* c, std::size_t c_row, std::size_t rows,
                   std::size_t columns) {
  alignas(64) T tile[kRows * kColumns<T>] = {};
  if (start.data != nullptr)
    for (std::size_t r = 0; r < rows; ++r) std::copy_n(start.data + r * start.stride, columns, tile + r * kColumns<T>);
  multiply_panels<T>(depth, a, b, {tile, kColumns<T>}, tile, kColumns<T>);
  for (std::size_t r = 0; r < rows; ++r) std::copy_n(tile + r * kColumns<T>, columns, c + r * c_row);
}

/// A block of C from packed blocks of A and B. `start` is at the block's first element.
template <class T>
void multiply_blocks(std::size_t rows, std::size_t columns, std::size_t depth, const ProductBlocks<T>& blocks,
                     Start<T> start, T* c, std::size_t c_row) {
  for (std::size_t column = 0; column < columns; column += kColumns<T>)
    for (std::size_t row = 0; row < rows; row += kRows) {
      const T* const a = blocks.a + row * depth;
      const T* const b = blocks.b + column * depth;
      const Start<T> from{start.data == nullptr ? nullptr : start.data + row * start.stride + column, start.stride};
      T* const to = c + row * c_row + column;
      const std::size_t high = std::min(kRows, rows - row), wide = std::min(kColumns<T>, columns - column);
      if (high == kRows && wide == kColumns<T>)
        multiply_panels<T>(depth, a, b, from, to, c_row);
      else
        multiply_edge<T>(depth, a, b, from, to, c_row, high, wide);
    }
}

/// The sums of half-precision products are in f32 until the last term is added.
template <class T>
void load_sums(const GemmArgs<T>& g, const T* bias, std::size_t columns, const T* c, std::size_t rows, float* sums) {
  for (std::size_t r = 0; r < rows; ++r, c += g.ldc, sums += kBlockColumns)
    for (std::size_t i = 0; i < columns; ++i) sums[i] = base::to_float(bias != nullptr ? bias[i] : c[i]);
}
template <class T>
void store_sums(const float* sums, std::size_t rows, std::size_t columns, T* c, std::size_t c_row) {
  for (std::size_t r = 0; r < rows; ++r, c += c_row, sums += kBlockColumns)
    for (std::size_t i = 0; i < columns; ++i) c[i] = base::from_float<T>(sums[i]);
}

/// Rows [row, row + rows) and columns [column, column + columns) of C, within the limits of the blocks.
template <class T>
void multiply_part(const GemmArgs<T>& g, const T* bias, std::size_t row, std::size_t rows, std::size_t column,
                   std::size_t columns, const ProductBlocks<OpMath<T>>& blocks) {
  using Sum = OpMath<T>;
  constexpr bool kHalf = !std::is_same_v<T, Sum>;
  const bool ta = g.trans_a == Transpose::yes, tb = g.trans_b == Transpose::yes;
  T* const c = g.c + row * g.ldc + column;
  const T* const from_bias = bias == nullptr ? nullptr : bias + column;
  const bool starts_at_zero = bias == nullptr && !g.accumulate;
  Sum* out;
  Start<Sum> start;
  std::size_t out_row;
  if constexpr (kHalf) {
    if (!starts_at_zero) load_sums(g, from_bias, columns, c, rows, blocks.sums);
    out = blocks.sums;
    out_row = kBlockColumns;
    start = {starts_at_zero ? nullptr : out, out_row};
  } else {
    out = c;
    out_row = g.ldc;
    start = bias != nullptr ? Start<Sum>{from_bias, 0} : Start<Sum>{starts_at_zero ? nullptr : c, g.ldc};
  }
  for (std::size_t at = 0; at == 0 || at < g.k; at += kBlockDepth) {  // an empty sum is still written
    const std::size_t depth = std::min(kBlockDepth, g.k - at);
    const Operand<T> b =
        tb ? Operand<T>{g.b + column * g.ldb + at, g.ldb, 1} : Operand<T>{g.b + at * g.ldb + column, 1, g.ldb};
    pack<kColumns<Sum>>(b, columns, depth, blocks.b);
    for (std::size_t i = 0; i < rows; i += kBlockRows) {
      const std::size_t high = std::min(kBlockRows, rows - i);
      const Operand<T> a =
          ta ? Operand<T>{g.a + at * g.lda + row + i, 1, g.lda} : Operand<T>{g.a + (row + i) * g.lda + at, g.lda, 1};
      pack<kRows>(a, high, depth, blocks.a);
      const Start<Sum> from{start.data == nullptr ? nullptr : start.data + i * start.stride, start.stride};
      multiply_blocks<Sum>(high, columns, depth, blocks, from, out + i * out_row, out_row);
    }
    start = {out, out_row};
  }
  if constexpr (kHalf) store_sums(blocks.sums, rows, columns, c, g.ldc);
}

template <class T>
void multiply(const GemmArgs<T>& g, const T* bias, const ProductBlocks<OpMath<T>>& blocks) {
  const std::size_t most = std::is_same_v<T, OpMath<T>> ? g.m : kSumRows;
  for (std::size_t row = 0; row < g.m; row += most)
    for (std::size_t column = 0; column < g.n; column += kBlockColumns)
      multiply_part(g, bias, row, std::min(most, g.m - row), column, std::min(kBlockColumns, g.n - column), blocks);
}

template <class T>
constexpr OwnProductTable<T> kTable{&multiply<T>};
using OwnProductTables = std::tuple<OwnProductTable<float>, OwnProductTable<double>, OwnProductTable<base::bf16>,
                                    OwnProductTable<base::f16>>;
const OwnProductTables* own_product_tables() {
  static constexpr OwnProductTables tables{kTable<float>, kTable<double>, kTable<base::bf16>, kTable<base::f16>};
  return &tables;
}

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
HWY_EXPORT(own_product_tables);
namespace {

/// Memory of one thread, aligned to a cache line, which grows to what its products need.
std::byte* block_memory(std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  thread_local std::vector<std::byte> memory;
  if (memory.size() < bytes + kLine) memory = std::vector<std::byte>(bytes + kLine);
  const std::size_t past = reinterpret_cast<std::uintptr_t>(memory.data()) % kLine;
  return memory.data() + (kLine - past) % kLine;
}

}  // namespace

template <class T>
void multiply_own(const GemmArgs<T>& g, const T* bias) {
  if (g.m == 0 || g.n == 0) return;
  using Sum = OpMath<T>;
  constexpr std::size_t kPanel = 64;  // at least a panel of any instruction set; blocks consist of whole panels
  const std::size_t depth = std::min(kBlockDepth, g.k);
  const std::size_t a = std::min(kBlockRows, g.m + kPanel) * depth, b = std::min(kBlockColumns, g.n + kPanel) * depth;
  const std::size_t sums = std::is_same_v<T, Sum> ? 0 : std::min(kSumRows, g.m) * kBlockColumns;
  const std::size_t a_end = tiles_of(a, kPanel) * kPanel;
  auto* const memory = reinterpret_cast<Sum*>(block_memory((b + a_end + sums) * sizeof(Sum)));
  std::get<OwnProductTable<T>>(*HWY_DYNAMIC_DISPATCH(own_product_tables)())
      .multiply(g, bias, {memory, memory + a_end, memory + a_end + b});
}

template void multiply_own<float>(const GemmArgs<float>&, const float*);
template void multiply_own<double>(const GemmArgs<double>&, const double*);
template void multiply_own<base::bf16>(const GemmArgs<base::bf16>&, const base::bf16*);
template void multiply_own<base::f16>(const GemmArgs<base::f16>&, const base::f16*);

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
