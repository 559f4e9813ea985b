#include "tessera/nn/kernels/gemm.h"

#include <string>
#include <type_traits>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/cpu/products.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/elementwise.h"

namespace tessera::nn::kernels {

using base::bf16;
using base::dtype_of;
using base::f16;

namespace {

// BLAS rounds an element differently at different positions in a tile (its edge kernels sum in another order), so one
// call for the whole matrix and several calls for its tiles give different bits. Every number of threads therefore uses
// the same tiles. They have at most 512 rows, and there are at least four if none becomes smaller than 192. The longer
// side is split (each split makes BLAS pack the other operand once more).
struct Tiling {
  std::size_t rows, columns, column_tiles, tiles;
};
constexpr std::size_t kMaxRows = 512, kMinSide = 192, kWantedTiles = 4;

Tiling tiling(std::size_t m, std::size_t n) {
  std::size_t row_tiles = std::max<std::size_t>(1, tiles_of(m, kMaxRows)), column_tiles = 1;
  if (m >= n)
    row_tiles = std::max(row_tiles, std::min(kWantedTiles, m / kMinSide));
  else
    column_tiles = std::max<std::size_t>(1, std::min(tiles_of(kWantedTiles, row_tiles), n / kMinSide));
  // Equal sides, in multiples of BLAS's register tile.
  const std::size_t rows = tiles_of(tiles_of(m, row_tiles), 16) * 16;
  const std::size_t columns = tiles_of(tiles_of(n, column_tiles), 48) * 48;
  column_tiles = tiles_of(n, columns);
  return {rows, columns, column_tiles, tiles_of(m, rows) * column_tiles};
}

/// True if oneDNN computes the product.
template <class T>
bool by_onednn(const GemmArgs<T>& g) {
  if constexpr (std::is_same_v<T, double>) return false;
  return has_onednn_product(dtype_of<T>) && g.k > 0;
}

template <class T>
void multiply_by_onednn(const GemmArgs<T>& g, const T* bias) {
  const bool ta = g.trans_a == Transpose::yes, tb = g.trans_b == Transpose::yes;
  multiply({.dtype = dtype_of<T>,
            .m = g.m,
            .n = g.n,
            .k = g.k,
            .a = g.a,
            .a_row = ta ? 1 : g.lda,
            .a_column = ta ? g.lda : 1,
            .b = g.b,
            .b_row = tb ? 1 : g.ldb,
            .b_column = tb ? g.ldb : 1,
            .bias = bias,
            .c = g.c,
            .c_row = g.ldc,
            .accumulate = g.accumulate});
}

/// C's tile [row, row + rows) x [column, column + columns).
template <class T>
GemmArgs<T> tile_of(GemmArgs<T> g, const Tiling& t, std::size_t index) {
  const std::size_t row = index / t.column_tiles * t.rows, column = index % t.column_tiles * t.columns;
  g.a += g.trans_a == Transpose::yes ? row : row * g.lda;
  g.b += g.trans_b == Transpose::yes ? column * g.ldb : column;
  g.c += row * g.ldc + column;
  g.m = std::min(t.rows, g.m - row);
  g.n = std::min(t.columns, g.n - column);
  return g;
}

/// Computes one tile; `bias`, if not null, is the initial value of each row of C.
template <class T>
void multiply_tile(const GemmArgs<T>& g, const T* bias, Products products) {
  if (products == Products::own) return multiply_own(g, bias);
  if (by_onednn(g)) return multiply_by_onednn(g, bias);
  if constexpr (sizeof(T) == 2) {
    throw base::Unsupported("gemm: this processor's library does not support products of " +
                            std::string(base::name_of(dtype_of<T>)));
  } else {
    GemmArgs<T> product = g;
    if (bias != nullptr) {
      for (std::size_t row = 0; row < g.m; ++row) std::copy(bias, bias + g.n, g.c + row * g.ldc);
      product.accumulate = true;
    }
    multiply_by_blas(product);
  }
}

/// Own products have the same bits for all tiles: each thread computes one, which packs fewest operands twice.
Tiling own_tiling(std::size_t m, std::size_t n, std::size_t threads) {
  constexpr std::size_t kStep = 48;
  if (m >= n) {
    const std::size_t rows = tiles_of(tiles_of(m, threads), kStep) * kStep;
    return {rows, n, 1, tiles_of(m, rows)};
  }
  const std::size_t columns = tiles_of(tiles_of(n, threads), kStep) * kStep;
  return {m, columns, tiles_of(n, columns), tiles_of(n, columns)};
}

/// Computes the products of all tiles; with a bias, it does not accumulate.
template <class T>
void gemm_tiles(ThreadPool& pool, GemmArgs<T> g, const T* bias, Products products) {
  if (g.m == 0 || g.n == 0) return;
  if (g.lda == 0) g.lda = std::max<std::size_t>(1, g.trans_a == Transpose::yes ? g.m : g.k);
  if (g.ldb == 0) g.ldb = std::max<std::size_t>(1, g.trans_b == Transpose::yes ? g.k : g.n);
  if (g.ldc == 0) g.ldc = g.n;
  const Tiling t = products == Products::own ? own_tiling(g.m, g.n, pool.threads()) : tiling(g.m, g.n);
  pool.parallel_for(t.tiles, [&](std::size_t index) {
    const GemmArgs<T> part = tile_of(g, t, index);
    multiply_tile(part, bias == nullptr ? nullptr : bias + index % t.column_tiles * t.columns, products);
  });
}

}  // namespace

std::size_t checked_stride(std::size_t stride, std::size_t row, bool packed) {
  if (stride == 0) return row;
  if (stride < row || (packed && stride > row))
    throw base::InvalidUsage("linear: rows of " + std::to_string(row) + " elements are " + std::to_string(stride) +
                             " elements apart; " + (packed ? "they must be packed" : "they overlap"));
  return stride;
}

template <class T>
void gemm(ThreadPool& pool, const GemmArgs<T>& args, Products products) {
  gemm_tiles<T>(pool, args, nullptr, products);
}

void gemm_tile(const GemmArgs<float>& args, Products products) { multiply_tile<float>(args, nullptr, products); }

bool has_product(Products products, base::DType dtype) {
  return products == Products::own || dtype == base::DType::f32 || dtype == base::DType::f64 ||
         has_onednn_product(dtype);
}

std::string products_name(Products products) {
  if (products == Products::own) return "tessera";
  const std::string onednn = onednn_name();
  if (!onednn.empty()) return onednn;
  return blas_name();
}

template <class T>
void linear_forward(ThreadPool& pool, const LinearForward<T>& args, Products products) {
  const LinearShape& s = args.shape;
  gemm_tiles<T>(pool,
                {.trans_b = s.layout == WeightLayout::out_in ? Transpose::yes : Transpose::no,
                 .m = s.rows,
                 .n = s.out,
                 .k = s.in,
                 .a = args.x,
                 .b = args.weight,
                 .c = args.y,
                 .ldc = row_stride(args)},
                args.bias, products);
}

template <class T>
void linear_backward(ThreadPool& pool, const LinearBackward<T>& args, Products products) {
  const LinearShape& s = args.shape;
  const bool out_in = s.layout == WeightLayout::out_in;
  const std::size_t dy_stride = row_stride(args);
  if constexpr (sizeof(T) > 2)
    if (args.dbias) column_sums<T>(pool, {args.dy, args.dbias, s.rows, s.out, args.accumulate_dbias});
  if (args.dweight) {
    // dW[in, out] = x^T dy, dW[out, in] = dy^T x
    gemm<T>(pool,
            {.trans_a = Transpose::yes,
             .m = out_in ? s.out : s.in,
             .n = out_in ? s.in : s.out,
             .k = s.rows,
             .a = out_in ? args.dy : args.x,
             .lda = out_in ? dy_stride : 0,
             .b = out_in ? args.x : args.dy,
             .ldb = out_in ? 0 : dy_stride,
             .accumulate = args.accumulate_dweight,
             .c = args.dweight},
            products);
  }
  if (args.dx) {
    gemm<T>(pool,
            {.trans_b = out_in ? Transpose::no : Transpose::yes,
             .m = s.rows,
             .n = s.in,
             .k = s.out,
             .a = args.dy,
             .lda = dy_stride,
             .b = args.weight,
             .accumulate = args.accumulate_dx,
             .c = args.dx},
            products);
  }
}

template void gemm<float>(ThreadPool&, const GemmArgs<float>&, Products);
template void gemm<double>(ThreadPool&, const GemmArgs<double>&, Products);
template TESSERA_API void gemm<bf16>(ThreadPool&, const GemmArgs<bf16>&, Products);
template TESSERA_API void gemm<f16>(ThreadPool&, const GemmArgs<f16>&, Products);
template void linear_forward<float>(ThreadPool&, const LinearForward<float>&, Products);
template void linear_forward<double>(ThreadPool&, const LinearForward<double>&, Products);
template TESSERA_API void linear_forward<bf16>(ThreadPool&, const LinearForward<bf16>&, Products);
template TESSERA_API void linear_forward<f16>(ThreadPool&, const LinearForward<f16>&, Products);
template void linear_backward<float>(ThreadPool&, const LinearBackward<float>&, Products);
template void linear_backward<double>(ThreadPool&, const LinearBackward<double>&, Products);
template TESSERA_API void linear_backward<bf16>(ThreadPool&, const LinearBackward<bf16>&, Products);
template TESSERA_API void linear_backward<f16>(ThreadPool&, const LinearBackward<f16>&, Products);

}  // namespace tessera::nn::kernels
