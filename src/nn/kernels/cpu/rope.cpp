#include "tessera/nn/kernels/rope.h"

#include <algorithm>
#include <numbers>
#include <string>

#include "tessera/base/error.h"
#include "tessera/base/portable_math.h"
#include "tessera/nn/kernels/cpu/tiles.h"

namespace tessera::nn::kernels {
namespace {

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

}  // namespace

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

}  // namespace tessera::nn::kernels
