#include "tessera/nn/kernels/dropout.h"

#include <cmath>
#include <string>

#include "tessera/base/error.h"
#include "tessera/nn/kernels/cpu/tiles.h"
#include "tessera/nn/random.h"

namespace tessera::nn::kernels {

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

}  // namespace tessera::nn::kernels
