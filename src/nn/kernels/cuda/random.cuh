// Philox, normal numbers and dropout, with the same bits as nn/random.cpp; and what draws such numbers.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"
#include "tessera/nn/kernels/orthonormalize.h"

namespace tessera::nn::cuda {

/// A random stream, as words that are passed to kernels by value.
struct PhiloxStream {
  std::uint32_t key0 = 0, key1 = 0;
  std::uint64_t high = 0;
};
inline PhiloxStream philox_stream(const RandomStream& s) { return {s.key[0], s.key[1], s.high}; }

struct PhiloxBlock {
  std::uint32_t word[4];
};

/// Words [4 * block, 4 * block + 4) of the stream.
TESSERA_DEVICE PhiloxBlock philox_block(const PhiloxStream& stream, std::uint64_t block) {
  std::uint32_t c0 = static_cast<std::uint32_t>(block), c1 = static_cast<std::uint32_t>(block >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(stream.high), c3 = static_cast<std::uint32_t>(stream.high >> 32);
  std::uint32_t k0 = stream.key0, k1 = stream.key1;
  TESSERA_UNROLL
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t{c0} * 0xD2511F53U, p1 = std::uint64_t{c2} * 0xCD9E8D57U;
    c0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<std::uint32_t>(p1);
    c2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<std::uint32_t>(p0);
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return {{c0, c1, c2, c3}};
}

template <std::size_t n>
TESSERA_DEVICE float horner_unfused(float x, const float (&c)[n]) {
  float sum = c[0];
  TESSERA_UNROLL
  for (std::size_t i = 1; i < n; ++i) sum = sum * x + c[i];  // this directory is compiled without contraction
  return sum;
}

TESSERA_DEVICE float natural_log(float x) {
  constexpr float kPolynomial[] = {7.0376836292e-2f,  -1.1514610310e-1f, 1.1676998740e-1f,
                                   -1.2420140846e-1f, 1.4249322787e-1f,  -1.6668057665e-1f,
                                   2.0000714765e-1f,  -2.4999993993e-1f, 3.3333331174e-1f};
  constexpr std::int32_t kRoot = 0x3f3504f3;  // sqrt(1/2)
  const std::int32_t shifted = bits_as<std::int32_t>(x) - kRoot;
  const float exponent = static_cast<float>(shifted >> 23);
  const float f = bits_as<float>((shifted & 0x007fffff) + kRoot) - 1.0f;
  const float z = f * f;
  float y = f * z * horner_unfused(f, kPolynomial);
  y = y + exponent * -2.12194440e-4f;
  y = y - 0.5f * z;
  return (f + y) + exponent * 0.693359375f;
}

TESSERA_DEVICE float quantile(float v) {
  constexpr float kA[] = {5.9109374720e1f, 1.5929113202e2f, 5.0434271938e1f, 3.3871327179e0f};
  constexpr float kB[] = {6.7187563600e1f, 7.8757757664e1f, 1.7895169469e1f, 1.0f};
  constexpr float kC[] = {1.7023821103e-1f, 1.3067284816e0f, 2.7568153900e0f, 1.4234372777e0f};
  constexpr float kD[] = {1.2021132975e-1f, 7.3700164250e-1f, 1.0f};
  const float q = 0.5f - v;
  if (q <= 0.425f) {
    const float r = 0.180625f - q * q;
    return q * horner_unfused(r, kA) / horner_unfused(r, kB);
  }
  const float t = root(-natural_log(v)) - 1.6f;
  return horner_unfused(t, kC) / horner_unfused(t, kD);
}

/// The lowest bit of a word is the sign; the other bits determine the quantile.
TESSERA_DEVICE float normal_of(std::uint32_t word) {
  const float magnitude = static_cast<float>(static_cast<std::int32_t>(word >> 1));
  const float value = quantile((magnitude + 0.5f) * 0x1p-32f);
  return bits_as<float>(bits_as<std::uint32_t>(value) ^ (word << 31));
}

template <class T>
TESSERA_DEVICE T drawn(const NormalFill<T>& a, std::uint32_t word) {
  return from_opmath<T>(a.mean + a.deviation * static_cast<OpMath<T>>(normal_of(word)));
}

/// 24 bits of the word, which every opmath type represents exactly.
template <class T>
TESSERA_DEVICE T drawn(const UniformFill<T>& a, std::uint32_t word) {
  const OpMath<T> u = static_cast<OpMath<T>>(static_cast<std::int32_t>(word >> 8)) * static_cast<OpMath<T>>(0x1p-24);
  return from_opmath<T>(a.low + (a.high - a.low) * u);
}

/// One thread per block of four words; elements outside [begin, end) are skipped.
template <class Fill>
TESSERA_KERNEL void random_kernel(Fill a, PhiloxStream stream) {
  const std::uint64_t block = a.range.begin / 4 + block_index() * thread_count() + thread_index();
  const PhiloxBlock words = philox_block(stream, block);
  for (int e = 0; e < 4; ++e) {
    const std::uint64_t i = block * 4 + e;
    if (i < a.range.begin || i >= a.range.end) continue;
    a.out[i - a.range.begin] = drawn(a, words.word[e]);
  }
}
template <class Fill>
void fill_random(NativeStream stream, const Fill& args) {
  if (args.range.begin >= args.range.end) return;
  const std::uint64_t blocks = (args.range.end + 3) / 4 - args.range.begin / 4;
  launch(stream, {.blocks = divided_up(blocks, 256)}, random_kernel<Fill>, args, philox_stream(args.range.stream));
}
template <class T>
void fill_normal(NativeStream stream, const NormalFill<T>& args) {
  fill_random(stream, args);
}
template <class T>
void fill_uniform(NativeStream stream, const UniformFill<T>& args) {
  fill_random(stream, args);
}

/// Dropout parameters; a probability of 0 drops nothing.
struct Drop {
  std::uint32_t threshold = 0;
  double factor = 1;
};
inline Drop drop_of(double probability) {
  const double most = std::ldexp(probability, 32);
  return {static_cast<std::uint32_t>(most < 4294967295.0 ? most : 4294967295.0), 1 / (1 - probability)};
}

template <class T>
struct DropoutPlan {
  const T* x;
  T* y;
  std::size_t samples, elements;
  bool accumulate;
  Drop drop;
  PhiloxStream stream;
};
/// One thread per four words of one sample.
template <class T>
TESSERA_KERNEL void dropout_kernel(DropoutPlan<T> a) {
  const std::size_t quads = divided_up(a.elements, 4);
  const std::size_t thread = block_index() * thread_count() + thread_index();
  const std::size_t sample = thread / quads, quad = thread % quads;
  if (sample >= a.samples) return;
  PhiloxStream stream = a.stream;
  stream.high += sample;
  const PhiloxBlock words = philox_block(stream, quad);
  for (std::size_t e = 0; e < 4 && quad * 4 + e < a.elements; ++e) {
    const std::size_t i = sample * a.elements + quad * 4 + e;
    const OpMath<T> kept = to_opmath(a.x[i]) * static_cast<OpMath<T>>(a.drop.factor);
    const OpMath<T> value = words.word[e] < a.drop.threshold ? OpMath<T>(0) : kept;
    a.y[i] = a.accumulate ? from_opmath<T>(to_opmath(a.y[i]) + value) : from_opmath<T>(value);
  }
}
template <class T>
void dropout(NativeStream stream, const kernels::DropoutArgs<T>& a) {
  if (!(a.probability >= 0 && a.probability < 1))
    throw base::InvalidUsage("dropout: probability " + std::to_string(a.probability) + " is outside [0, 1)");
  const DropoutPlan<T> plan{
      a.x, a.y, a.samples, a.elements, a.accumulate, drop_of(a.probability), philox_stream(a.stream)};
  launch(stream, {.blocks = divided_up(a.samples * divided_up(a.elements, 4), 256)}, dropout_kernel<T>, plan);
}

// Orthonormalizes the columns of a thin matrix (kernels/orthonormalize.h), with the same bits as on the host.

using kernels::OrthonormalizeArgs;

/// The matrix as seen by a block of threads: a thread reads and writes only its own rows.
struct BlocksRows {
  OrthonormalizeArgs m;
  double* room;

  TESSERA_DEVICE float& at(std::size_t row, std::size_t column) const { return m.matrix[row * m.columns + column]; }
  TESSERA_DEVICE double dot(std::size_t a, std::size_t b) const {
    double sum = 0;
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count())
      sum += static_cast<double>(at(row, a)) * static_cast<double>(at(row, b));
    return over_block(sum, Add{}, room);
  }
  TESSERA_DEVICE void subtract(std::size_t column, std::size_t other, double along) const {
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count())
      at(row, column) =
          static_cast<float>(static_cast<double>(at(row, column)) - along * static_cast<double>(at(row, other)));
  }
  TESSERA_DEVICE void divide(std::size_t column, double length) const {
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count())
      at(row, column) = static_cast<float>(static_cast<double>(at(row, column)) / length);
  }
  TESSERA_DEVICE void clear(std::size_t column) const {
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count()) at(row, column) = 0;
  }
  TESSERA_DEVICE void draw(std::size_t column, const PhiloxStream& stream) const {
    const NormalFill<float> normal{.mean = 0, .deviation = 1};
    for (std::size_t row = thread_index(); row < m.rows; row += thread_count()) {
      const std::uint64_t number = column * m.rows + row;
      at(row, column) = drawn(normal, philox_block(stream, number / 4).word[number % 4]);
    }
  }
};

struct FreshColumns {
  PhiloxStream stream[kernels::kFreshColumns];
};

/// Of a length or its square.
TESSERA_DEVICE bool finite(double length) { return length <= 1.7976931348623157e308; }  // false for NaN too

/// One block, whose threads process the columns together.
TESSERA_PLAIN_KERNEL void orthonormalize_kernel(OrthonormalizeArgs m, FreshColumns fresh) {
  const BlocksRows rows{m, shared_memory<double>()};
  for (std::size_t column = 0; column < m.columns; ++column) {
    if (column >= m.rows) {
      if (!finite(rows.dot(column, column))) return;
      rows.clear(column);
      continue;
    }
    for (std::uint64_t attempt = 0; attempt < kernels::kFreshColumns; ++attempt) {
      const double before = root(rows.dot(column, column));
      for (int pass = 0; pass < 2; ++pass)
        for (std::size_t other = 0; other < column; ++other) rows.subtract(column, other, rows.dot(column, other));
      const double length = root(rows.dot(column, column));
      if (!finite(length)) return;
      if (length > kernels::kDependent * before) {
        rows.divide(column, length);
        break;
      }
      rows.draw(column, fresh.stream[attempt]);
    }
  }
}

inline void orthonormalize(NativeStream stream, const OrthonormalizeArgs& args) {
  if (args.rows == 0 || args.columns == 0) return;
  FreshColumns fresh;
  for (std::uint64_t seed = 0; seed < kernels::kFreshColumns; ++seed)
    fresh.stream[seed] = philox_stream(tensor_stream(seed, "fresh"));
  static_assert(kernels::kOrthonormalizeParts % kWarp == 0);
  launch(stream, {.blocks = 1, .threads = kernels::kOrthonormalizeParts, .shared = kReduceRoom<double>},
         orthonormalize_kernel, args, fresh);
}

}  // namespace tessera::nn::cuda
