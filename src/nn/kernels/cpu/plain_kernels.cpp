// Kernels that the compiler vectorizes or that have no need of it: embeddings, rotary positions and dropout.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/kernels/dropout.h"
#include "tessera/nn/kernels/elementwise.h"
#include "tessera/nn/kernels/embedding.h"
#include "tessera/nn/kernels/opmath.h"
#include "tessera/nn/kernels/orthonormalize.h"
#include "tessera/nn/kernels/rope.h"
#include "tessera/nn/random.h"

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

// The products are separate from the sum (the whole library is compiled without contraction), so the compiler's vectors
// and tails give the same bits.
template <class T>
void rotate(const RopeArgs<T>& a, std::size_t position, const T* in, T* out) {
  const std::size_t half = a.dim / 2;
  const T* cosine = a.cosine + position * half;
  const T* sine = a.sine + position * half;
  const T sign = a.inverse ? T(-1) : T(1);
  for (std::size_t i = 0; i < half; ++i) {
    const T s = sign * sine[i];
    const T first = in[i] * cosine[i] - in[i + half] * s;
    const T second = in[i + half] * cosine[i] + in[i] * s;
    out[i] = a.accumulate ? out[i] + first : first;
    out[i + half] = a.accumulate ? out[i + half] + second : second;
  }
}

void check_even(std::size_t dim) {
  if (dim % 2 != 0) throw base::InvalidUsage("rope: head dimension " + std::to_string(dim) + " is odd, needs pairs");
}

double scaled(double frequency, const RopeScaling& s) {
  if (s.factor == 1) return frequency;
  if (s.high == 0) return frequency / s.factor;
  const double periods = s.original_context * frequency / (2 * std::numbers::pi);
  const double kept = std::clamp((periods - s.low) / (s.high - s.low), 0.0, 1.0);
  return (1 - kept) * frequency / s.factor + kept * frequency;
}

constexpr std::size_t kParts = kOrthonormalizeParts, kWarp = 32;

double total_of(std::array<double, kParts>& parts) {
  double total = 0;
  for (std::size_t warp = 0; warp < kParts; warp += kWarp) {
    for (std::size_t half = kWarp / 2; half > 0; half /= 2)
      for (std::size_t t = warp; t < warp + half; ++t) parts[t] += parts[t + half];
    total = warp == 0 ? parts[0] : total + parts[warp];
  }
  return total;
}

double dot(const OrthonormalizeArgs& m, std::size_t a, std::size_t b) {
  std::array<double, kParts> parts{};
  for (std::size_t first = 0; first < m.rows; first += kParts) {
    const float* const row = m.matrix + first * m.columns;
    for (std::size_t t = 0; t < std::min(kParts, m.rows - first); ++t)
      parts[t] += static_cast<double>(row[t * m.columns + a]) * static_cast<double>(row[t * m.columns + b]);
  }
  return total_of(parts);
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

template <class T>
void dropout(ThreadPool& pool, const DropoutArgs<T>& args) {
  if (!(args.probability >= 0 && args.probability < 1))
    throw base::InvalidUsage("dropout: probability " + std::to_string(args.probability) + " is outside [0, 1)");
  // Drops an element if its word is below p * 2^32; at p = 0 drops none.
  const auto threshold = static_cast<std::uint32_t>(std::min(std::ldexp(args.probability, 32), 4294967295.0));
  const T factor = static_cast<T>(1 / (1 - args.probability));
  constexpr std::size_t kTile = 4096;
  const std::size_t tiles = tiles_of(args.elements, kTile);
  pool.parallel_for(args.samples * tiles, [&](std::size_t index) {
    const std::size_t sample = index / tiles, begin = index % tiles * kTile;
    const std::size_t end = std::min(args.elements, begin + kTile);
    std::uint32_t words[kTile];
    random_words({args.stream.key, args.stream.high + sample}, begin, end, words);
    const T* x = args.x + sample * args.elements + begin;
    T* y = args.y + sample * args.elements + begin;
    // Multiplies before selecting, so that the loops have no branch.
    if (args.accumulate) {
      for (std::size_t i = 0; i < end - begin; ++i) {
        const T kept = x[i] * factor;
        y[i] += words[i] < threshold ? T(0) : kept;
      }
    } else {
      for (std::size_t i = 0; i < end - begin; ++i) {
        const T kept = x[i] * factor;
        y[i] = words[i] < threshold ? T(0) : kept;
      }
    }
  });
}

template void dropout<float>(ThreadPool&, const DropoutArgs<float>&);
template void dropout<double>(ThreadPool&, const DropoutArgs<double>&);

template <class T>
void rope_table(std::size_t positions, std::size_t dim, double theta, T* cosine, T* sine, const RopeScaling& scaling) {
  check_even(dim);
  const std::size_t half = dim / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double frequency =
        scaled(base::portable::power(theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim)), scaling);
    for (std::size_t position = 0; position < positions; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      cosine[position * half + i] = static_cast<T>(base::portable::cosine(angle));
      sine[position * half + i] = static_cast<T>(base::portable::sine(angle));
    }
  }
}

template <class T>
void rope(ThreadPool& pool, const RopeArgs<T>& args) {
  check_even(args.dim);
  constexpr std::size_t kRows = 64;  // of a tile
  for_tiles(pool, args.batch * args.positions, kRows, [&](std::size_t begin, std::size_t end) {
    for (std::size_t row = begin; row < end; ++row) {
      const std::size_t b = row / args.positions, position = row % args.positions;
      for (std::size_t h = 0; h < args.heads; ++h)
        rotate(
            args, position,
            args.in.data + b * args.in.batch_stride + position * args.in.position_stride + h * args.in.head_stride,
            args.out.data + b * args.out.batch_stride + position * args.out.position_stride + h * args.out.head_stride);
    }
  });
}

template void rope_table<float>(std::size_t, std::size_t, double, float*, float*, const RopeScaling&);
template void rope_table<double>(std::size_t, std::size_t, double, double*, double*, const RopeScaling&);
template void rope<float>(ThreadPool&, const RopeArgs<float>&);
template void rope<double>(ThreadPool&, const RopeArgs<double>&);

void orthonormalize(const OrthonormalizeArgs& m) {
  std::vector<float> fresh;
  for (std::size_t column = 0; column < m.columns; ++column) {
    const auto at = [&](std::size_t row) -> float& { return m.matrix[row * m.columns + column]; };
    if (column >= m.rows) {
      if (!std::isfinite(dot(m, column, column))) return;
      for (std::size_t row = 0; row < m.rows; ++row) at(row) = 0;
      continue;
    }
    for (std::uint64_t attempt = 0; attempt < kFreshColumns; ++attempt) {
      const double before = std::sqrt(dot(m, column, column));
      for (int pass = 0; pass < 2; ++pass)
        for (std::size_t other = 0; other < column; ++other) {
          const double along = dot(m, column, other);
          for (std::size_t row = 0; row < m.rows; ++row)
            at(row) = static_cast<float>(static_cast<double>(at(row)) -
                                         along * static_cast<double>(m.matrix[row * m.columns + other]));
        }
      const double length = std::sqrt(dot(m, column, column));
      if (!std::isfinite(length)) return;
      if (length > kDependent * before) {
        for (std::size_t row = 0; row < m.rows; ++row)
          at(row) = static_cast<float>(static_cast<double>(at(row)) / length);
        break;
      }
      fresh.resize(m.rows);
      fill_normal({"fresh", attempt, column * m.rows, (column + 1) * m.rows}, 0.0F, 1.0F, fresh.data());
      for (std::size_t row = 0; row < m.rows; ++row) at(row) = fresh[row];
    }
  }
}

}  // namespace tessera::nn::kernels
