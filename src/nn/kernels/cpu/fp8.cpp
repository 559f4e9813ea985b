#include "tessera/nn/kernels/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/cpu/products.h"
#include "tessera/nn/kernels/cpu/tiles.h"

namespace tessera::nn::kernels {
namespace {

/// Rows of a matrix that one task quantizes.
constexpr std::size_t kQuantizeRows = 64;

/// Extents of a product's tile. They fix the order of the sums: BLAS sums kDepth terms, and adds them to the sums
/// before.
constexpr std::size_t kRows = 128, kColumns = 256, kDepth = 256;

void require_multiple(const char* what, std::size_t extent) {
  if (extent % kFp8Multiple != 0)
    throw base::InvalidUsage("fp8: " + std::string(what) + " is " + std::to_string(extent) + ", needs a multiple of " +
                             std::to_string(kFp8Multiple));
}

/// Of the finite values: what the others make NaN shows them, and they must not spoil the scale.
template <class T>
float amax_of(ThreadPool& pool, const T* in, std::size_t count) {
  std::vector<float> parts(tiles_of(count, kElementTile), 0.0F);
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    float most = 0;
    for (std::size_t i = begin; i < end; ++i) {
      const float magnitude = std::fabs(static_cast<float>(in[i]));
      most = magnitude > most && magnitude <= std::numeric_limits<float>::max() ? magnitude : most;
    }
    parts[begin / kElementTile] = most;
  });
  return parts.empty() ? 0.0F : *std::max_element(parts.begin(), parts.end());
}

/// The amax that the scale comes from; updates the history.
template <class T>
float scaling_amax(ThreadPool& pool, const Fp8QuantizeArgs& a) {
  if (a.scaling == Fp8Scaling::none) return 0;
  const auto own = [&] { return amax_of(pool, static_cast<const T*>(a.in), a.rows * a.columns); };
  if (a.scaling == Fp8Scaling::current) return own();
  if (a.updates) {
    std::copy_backward(a.history, a.history + kFp8History, a.history + kFp8History + 1);
    a.history[0] = own();
  }
  const float before = *std::max_element(a.history + 1, a.history + 1 + kFp8History);
  if (before > 0) return before;
  return a.updates ? a.history[0] : own();
}

template <class T>
void quantize_on(ThreadPool& pool, const Fp8QuantizeArgs& a) {
  const int exponent = fp8_exponent(a.format, scaling_amax<T>(pool, a));
  const float scale = fp8_power(exponent);
  *a.descale = fp8_power(-exponent);
  const T* const in = static_cast<const T*>(a.in);
  const std::size_t padded = fp8_padded(a.rows);
  for_tiles(pool, padded, kQuantizeRows, [&](std::size_t begin, std::size_t end) {
    std::vector<std::uint8_t> codes(a.columns);
    for (std::size_t row = begin; row < end; ++row) {
      if (row < a.rows) {
        const T* const from = in + row * a.columns;
        for (std::size_t i = 0; i < a.columns; ++i)
          codes[i] = encode_fp8(a.format, static_cast<float>(from[i]) * scale);
        if (a.out != nullptr) std::copy(codes.begin(), codes.end(), a.out + row * a.columns);
      } else {
        std::fill(codes.begin(), codes.end(), std::uint8_t{0});
      }
      if (a.transposed != nullptr)
        for (std::size_t i = 0; i < a.columns; ++i) a.transposed[i * padded + row] = codes[i];
    }
  });
}

using Table = std::array<float, 256>;

constexpr Table table_of(Fp8Format format) {
  Table values{};
  for (std::size_t code = 0; code < values.size(); ++code)
    values[code] = decode_fp8(format, static_cast<std::uint8_t>(code));
  return values;
}
constexpr Table kE4m3 = table_of(Fp8Format::e4m3), kE5m2 = table_of(Fp8Format::e5m2);

/// Decodes rows of `k` codes from `row` and `at` on: out[rows, count].
void decode_part(const Fp8Operand& operand, std::size_t k, std::size_t row, std::size_t rows, std::size_t at,
                 std::size_t count, float* out) {
  const Table& values = operand.format == Fp8Format::e4m3 ? kE4m3 : kE5m2;
  for (std::size_t r = 0; r < rows; ++r) {
    const std::uint8_t* const from = operand.codes + (row + r) * k + at;
    for (std::size_t i = 0; i < count; ++i) out[r * count + i] = values[from[i]];
  }
}

/// Rounds a tile of sums to c.
template <class T>
void finish_tile(const Fp8ProductArgs& p, std::size_t row, std::size_t column, const GemmArgs<float>& sums) {
  const float factor = *p.a.descale * *p.b.descale;
  const T* const bias = static_cast<const T*>(p.bias);
  for (std::size_t r = 0; r < sums.m; ++r) {
    T* const out = static_cast<T*>(p.c) + (row + r) * p.n + column;
    for (std::size_t i = 0; i < sums.n; ++i) {
      float value = sums.c[r * sums.n + i] * factor;
      if (bias != nullptr) value += static_cast<float>(bias[column + i]);
      if (p.accumulate) value += static_cast<float>(out[i]);
      out[i] = static_cast<T>(value);
    }
  }
}

template <class T>
void multiply_on(ThreadPool& pool, const Fp8ProductArgs& p, Products products) {
  const std::size_t across = tiles_of(p.n, kColumns);
  pool.parallel_for(tiles_of(p.m, kRows) * across, [&](std::size_t tile) {
    const std::size_t row = tile / across * kRows, column = tile % across * kColumns;
    const std::size_t rows = std::min(kRows, p.m - row), columns = std::min(kColumns, p.n - column);
    std::vector<float> a(rows * kDepth), b(columns * kDepth), c(rows * columns, 0.0F);
    GemmArgs<float> product{.trans_b = Transpose::yes,
                            .m = rows,
                            .n = columns,
                            .a = a.data(),
                            .b = b.data(),
                            .accumulate = true,
                            .c = c.data(),
                            .ldc = columns};
    for (std::size_t at = 0; at < p.k; at += kDepth) {
      const std::size_t depth = std::min(kDepth, p.k - at);
      product.k = product.lda = product.ldb = depth;
      decode_part(p.a, p.k, row, rows, at, depth, a.data());
      decode_part(p.b, p.k, column, columns, at, depth, b.data());
      gemm_tile(product, products);
    }
    finish_tile<T>(p, row, column, product);
  });
}

constexpr const char* kAdvice = "; use f32, f16 or bf16";

}  // namespace

void check(const Fp8QuantizeArgs& args) {
  require_multiple("the number of columns", args.columns);
  if (args.scaling == Fp8Scaling::delayed && args.history == nullptr)
    throw base::InvalidUsage("fp8: delayed scaling needs a history of amaxes");
}

void check(const Fp8ProductArgs& args) {
  require_multiple("the number of columns", args.n);
  require_multiple("the extent of the sums", args.k);
  if (args.a.format == Fp8Format::e5m2 && args.b.format == Fp8Format::e5m2)
    throw base::InvalidUsage("fp8: both operands are E5M2, which no device multiplies; use E4M3 for one");
  for (const float* factor : {args.a.descale, args.b.descale})
    if (reinterpret_cast<std::uintptr_t>(factor) % kFp8Multiple != 0)
      throw base::InvalidUsage("fp8: an operand's factor isn't aligned to 16 bytes");
}

void fp8_quantize(ThreadPool& pool, const Fp8QuantizeArgs& args) {
  for_compute_dtype("fp8", args.dtype, kAdvice, [&](auto zero) { quantize_on<decltype(zero)>(pool, args); });
}

void fp8_product(ThreadPool& pool, const Fp8ProductArgs& args, Products products) {
  for_compute_dtype("fp8", args.dtype, kAdvice, [&](auto zero) { multiply_on<decltype(zero)>(pool, args, products); });
}

}  // namespace tessera::nn::kernels
