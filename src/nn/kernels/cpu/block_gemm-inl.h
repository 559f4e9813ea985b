// Products of blocks that fit in the first cache levels, for attention. Each element of C is one chain of fused
// multiply-adds over k in order, so the bits depend neither on the register tile nor on the vector width.
#if defined(TESSERA_NN_KERNELS_BLOCK_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_NN_KERNELS_BLOCK_GEMM_INL_H_
#undef TESSERA_NN_KERNELS_BLOCK_GEMM_INL_H_
#else
#define TESSERA_NN_KERNELS_BLOCK_GEMM_INL_H_
#endif

#include <algorithm>

#include "tessera/nn/kernels/cpu/attention_block.h"
#include "tessera/nn/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {

/// The half of a square diagonal block that is computed; the other half is skipped in steps of kStripRows rows.
enum class Triangle {
  none,
  c_upper,  ///< only C[i, j] with j >= i is needed
  c_lower,  ///< only C[i, j] with j <= i is needed
  a_upper,  ///< A[i, k] is zero for k < i
  a_lower,  ///< A[i, k] is zero for k > i
};

/// Rows of C that are computed together. 6 x 2 sums and two vectors of B fit in AVX2's 16 registers.
inline constexpr std::size_t kStripRows = 6;

/// What a product does with what C held before.
enum class Output : bool { overwrite, add };

/// C[m, n] = (or +=) A[m, k] B[k, n]. A's element (i, l) is a.data[i * a.row + l * a.column]. B's rows are readable up
/// to n rounded up to kLanes; C's rows are not accessed beyond n.
template <class T>
struct BlockGemm {
  std::size_t m = 0, n = 0, k = 0;
  struct {
    const T* data;
    std::size_t row, column = 1;
  } a;
  Rows<const T> b;
  Rows<T> c;
  Output output = Output::overwrite;
  Triangle triangle = Triangle::none;
};

/// R rows by V vectors of C over k in [begin, end).
template <std::size_t R, std::size_t V, class T>
HWY_INLINE void strip(const BlockGemm<T>& g, std::size_t begin, std::size_t end, const T* a, const T* b, T* c,
                      std::size_t c_row) {
  Vec<T> sum[R][V];
  HWY_UNROLL(6)
  for (std::size_t r = 0; r < R; ++r) HWY_UNROLL(2)
  for (std::size_t v = 0; v < V; ++v)
    sum[r][v] = g.output == Output::add ? load<T>(c + r * c_row + v * kLanes<T>) : hn::Zero(Tag<T>());
  for (std::size_t l = begin; l < end; ++l) {
    Vec<T> line[V];
    HWY_UNROLL(2)
    for (std::size_t v = 0; v < V; ++v) line[v] = load<T>(b + l * g.b.stride + v * kLanes<T>);
    HWY_UNROLL(6)
    for (std::size_t r = 0; r < R; ++r) {
      const Vec<T> factor = hn::Set(Tag<T>(), a[r * g.a.row + l * g.a.column]);
      HWY_UNROLL(2)
      for (std::size_t v = 0; v < V; ++v) sum[r][v] = mul_add<T>(factor, line[v], sum[r][v]);
    }
  }
  HWY_UNROLL(6)
  for (std::size_t r = 0; r < R; ++r) HWY_UNROLL(2)
  for (std::size_t v = 0; v < V; ++v) store<T>(sum[r][v], c + r * c_row + v * kLanes<T>);
}

/// strip() with as many rows as remain, of at most R.
template <std::size_t R, std::size_t V, class T>
HWY_INLINE void strip_rows(std::size_t rows, const BlockGemm<T>& g, std::size_t begin, std::size_t end, const T* a,
                           const T* b, T* c, std::size_t c_row) {
  if constexpr (R > 1)
    if (rows < R) return strip_rows<R - 1, V>(rows, g, begin, end, a, b, c, c_row);
  strip<R, V>(g, begin, end, a, b, c, c_row);
}

/// Columns [column, column + V vectors) of all rows.
template <std::size_t V, class T>
HWY_INLINE void panel(const BlockGemm<T>& g, std::size_t column) {
  constexpr std::size_t kWidth = V * kLanes<T>;
  const std::size_t columns = std::min(kWidth, g.n - column);
  for (std::size_t row = 0; row < g.m; row += kStripRows) {
    const std::size_t rows = std::min(kStripRows, g.m - row);
    if (g.triangle == Triangle::c_upper && column + kWidth <= row) continue;
    if (g.triangle == Triangle::c_lower && column >= row + rows) continue;
    const std::size_t begin = g.triangle == Triangle::a_upper ? std::min(row, g.k) : 0;
    const std::size_t end = g.triangle == Triangle::a_lower ? std::min(g.k, row + rows) : g.k;
    T* c = g.c.data + row * g.c.stride + column;
    if (columns == kWidth) {
      strip_rows<kStripRows, V>(rows, g, begin, end, g.a.data + row * g.a.row, g.b.data + column, c, g.c.stride);
      continue;
    }
    alignas(64) T padded[kStripRows * kWidth] = {};
    for (std::size_t r = 0; r < rows && g.output == Output::add; ++r)
      std::copy(c + r * g.c.stride, c + r * g.c.stride + columns, padded + r * kWidth);
    strip_rows<kStripRows, V>(rows, g, begin, end, g.a.data + row * g.a.row, g.b.data + column, padded, kWidth);
    for (std::size_t r = 0; r < rows; ++r)
      std::copy(padded + r * kWidth, padded + r * kWidth + columns, c + r * g.c.stride);
  }
}

template <class T>
void block_gemm(const BlockGemm<T>& g) {
  std::size_t column = 0;
  for (; column + 2 * kLanes<T> <= g.n; column += 2 * kLanes<T>) panel<2>(g, column);
  for (; column < g.n; column += kLanes<T>) panel<1>(g, column);
}

/// out[d, r] = factor * in[r, d] for r < rows, zero for rows <= r < out_row.
template <class T>
void transpose_scaled(const T* in, std::size_t in_row, std::size_t rows, std::size_t dim, T factor, T* out,
                      std::size_t out_row) {
  for (std::size_t d = 0; d < dim; ++d) {
    for (std::size_t r = 0; r < rows; ++r) out[d * out_row + r] = factor * in[r * in_row + d];
    for (std::size_t r = rows; r < out_row; ++r) out[d * out_row + r] = T(0);
  }
}

}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per target
