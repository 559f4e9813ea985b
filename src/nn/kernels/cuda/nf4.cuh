// Weights in four bits (nf4.h), with the same bits as on the host.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/nf4.h"

namespace tessera::nn::cuda {

template <class T>
struct DecodeNf4Body {
  const unsigned char* encoded;
  Nf4Layout layout;
  std::array<float, kNf4Levels.size()> levels;
  T* out;

  TESSERA_DEVICE float scale_of(std::size_t block) const {
    const auto* numbers = reinterpret_cast<const float*>(encoded);
    const auto code = static_cast<std::int8_t>(encoded[layout.scales + block]);
    const float scale = numbers[0] + numbers[1 + block / kNf4ScaleBlock] * static_cast<float>(code);
    return scale < 0 ? 0.0F : scale;
  }
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    static_assert(kNf4Block % n == 0);  // so one scale applies to all n
    const float scale = scale_of(i / kNf4Block);
    Pack<T, n> values;
    for (int e = 0; e < n; ++e) {
      const unsigned pair = encoded[layout.codes + (i + e) / 2];
      values.at[e] = from_opmath<T>(static_cast<OpMath<T>>(scale * levels[(pair >> ((i + e) % 2 * 4)) & 15U]));
    }
    store<n>(out + i, values);
  }
};

template <class T>
void decode_nf4(NativeStream stream, const DecodeArgs& a) {
  for_elements<kVector<T>>(stream, static_cast<std::size_t>(a.count), {a.out},
                           DecodeNf4Body<T>{static_cast<const unsigned char*>(a.encoded), Nf4Layout(a.count),
                                            kNf4Levels, static_cast<T*>(a.out)});
}

}  // namespace tessera::nn::cuda
