// Lossy compression (kernels/compression.h), with the same bits as on the host.
#pragma once

#include "tessera/nn/kernels/cuda/elementwise.cuh"
#include "tessera/nn/kernels/cuda/reduce.cuh"

namespace tessera::nn::cuda {

using kernels::CompressArgs;
using kernels::Compression;
using kernels::kCompressionBlock;
using kernels::SumCompressedArgs;

TESSERA_DEVICE bool is_finite(float x) { return (bits_as<std::uint32_t>(x) & 0x7f800000U) != 0x7f800000U; }
/// The encoding error; 0 for values that aren't finite.
TESSERA_DEVICE float lost(float value, float decoded) { return is_finite(value - decoded) ? value - decoded : 0.0F; }

template <class T>
struct CompressBf16Body {
  const T* in;
  bf16* out;
  float* error;
  float factor;
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    for (int e = 0; e < n; ++e) {
      const float given = factor * to_opmath(in[i + e]);
      const float value = error ? given + error[i + e] : given;
      out[i + e] = from_opmath<bf16>(value);
      if (error) error[i + e] = lost(value, to_opmath(out[i + e]));
    }
  }
};

/// One thread block per block of values.
template <class T>
TESSERA_KERNEL void quantize_kernel(CompressArgs a, float* scales, std::int8_t* out) {
  constexpr float kLevels = 127, kSmallest = 1e-30F;
  const std::size_t i = block_index() * kCompressionBlock + thread_index();
  float value = 0;
  if (i < a.count) value = a.factor * to_opmath(static_cast<const T*>(a.in)[i]);
  if (i < a.count && a.error) value += a.error[i];
  // The largest magnitude, compared by bits: those of NaN are above infinity's.
  const auto magnitude = static_cast<int>(bits_as<std::uint32_t>(value) & 0x7fffffffU);
  const float most = bits_as<float>(over_block(magnitude, Largest{}, shared_memory<int>()));
  const bool usable = most >= kSmallest && is_finite(most);
  const float scale = usable ? most / kLevels : (most < kSmallest ? 0.0F : most - most);
  const float quantum = usable ? rintf(value * (kLevels / most)) : 0.0F;
  if (thread_index() == 0) scales[block_index()] = scale;
  if (i >= a.count) return;
  out[i] = static_cast<std::int8_t>(quantum);
  if (a.error) a.error[i] = lost(value, quantum * scale);
}

template <class T>
void compress(NativeStream stream, const CompressArgs& a) {
  const T* in = static_cast<const T*>(a.in);
  if (a.compression == Compression::bf16)
    return for_elements<4>(stream, a.count, {a.in, a.out},
                           CompressBf16Body<T>{in, static_cast<bf16*>(a.out), a.error, a.factor});
  const std::size_t blocks = divided_up(a.count, kCompressionBlock);
  auto* scales = static_cast<float*>(a.out);
  launch(stream, {.blocks = blocks, .threads = kCompressionBlock, .shared = kReduceRoom<int>}, quantize_kernel<T>, a,
         scales, reinterpret_cast<std::int8_t*>(scales + blocks));
}

template <class T>
struct SumCompressedBody {
  SumCompressedArgs args;
  std::size_t blocks;
  TESSERA_DEVICE float decoded(const unsigned char* source, std::size_t i) const {
    if (args.compression == Compression::bf16) return to_opmath(reinterpret_cast<const bf16*>(source)[i]);
    const float* scales = reinterpret_cast<const float*>(source);
    return static_cast<float>(reinterpret_cast<const std::int8_t*>(scales + blocks)[i]) * scales[i / kCompressionBlock];
  }
  template <int n>
  TESSERA_DEVICE void step(std::size_t i) const {
    for (int e = 0; e < n; ++e) {
      float sum = -0.0F;
      for (std::size_t s = 0; s < args.sources; ++s)
        sum += decoded(static_cast<const unsigned char*>(args.in) + s * args.stride, i + e);
      static_cast<T*>(args.out)[i + e] = from_opmath<T>(args.divisor == 1 ? sum : sum / args.divisor);
    }
  }
};

template <class T>
void sum_compressed(NativeStream stream, const SumCompressedArgs& a) {
  for_elements<4>(stream, a.count, {a.in, a.out}, SumCompressedBody<T>{a, divided_up(a.count, kCompressionBlock)});
}

}  // namespace tessera::nn::cuda
