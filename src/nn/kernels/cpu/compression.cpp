#include "tessera/nn/kernels/compression.h"

#include <cmath>
#include <cstring>

#include "tessera/nn/kernels/cpu/tiles.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tessera/nn/kernels/cpu/compression.cpp"
#include "hwy/foreach_target.h"  // includes this file once per instruction set

#include "tessera/nn/kernels/cpu/simd-inl.h"

#ifndef TESSERA_NN_KERNELS_ENCODING_ONCE
#define TESSERA_NN_KERNELS_ENCODING_ONCE
namespace tessera::nn::kernels {
/// Functions on whole blocks; shorter blocks are padded with zeros.
struct CompressionTable {
  float (*quantize)(const float* in, std::int8_t* out);  // returns the scale
  void (*add_quantized)(const std::int8_t* in, float scale, float* sum);
  void (*divide)(float* values, float divisor);
};
}  // namespace tessera::nn::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::nn::kernels::HWY_NAMESPACE {
namespace {

using Floats = Tag<float>;
using Words = hn::RebindToSigned<Floats>;
using Bytes = hn::Rebind<std::int8_t, Floats>;

/// The largest magnitude, compared by bits: those of NaN are above infinity's, so NaN is preserved.
float largest(const float* in) {
  const Words words;
  auto most = hn::Zero(words);
  for (std::size_t i = 0; i < kCompressionBlock; i += kLanes<float>)
    most = hn::Max(most, hn::BitCast(words, hn::Abs(load<float>(in + i))));
  alignas(64) std::int32_t lane[kLanes<float>];
  hn::Store(most, words, lane);
  std::int32_t bits = 0;
  for (const std::int32_t each : lane) bits = each > bits ? each : bits;
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float quantize(const float* in, std::int8_t* out) {
  constexpr float kLevels = 127, kSmallest = 1e-30F;
  const float most = largest(in);
  if (!(most >= kSmallest && most < hwy::HighestValue<float>())) {
    std::memset(out, 0, kCompressionBlock);
    return most < kSmallest ? 0.0F : most - most;  // for infinity and NaN: NaN
  }
  const auto factor = set<float>(static_cast<double>(kLevels / most));
  for (std::size_t i = 0; i < kCompressionBlock; i += kLanes<float>)
    hn::StoreU(hn::DemoteTo(Bytes(), hn::NearestInt(hn::Mul(load<float>(in + i), factor))), Bytes(), out + i);
  return most / kLevels;
}

void add_quantized(const std::int8_t* in, float scale, float* sum) {
  const auto factor = set<float>(static_cast<double>(scale));
  for (std::size_t i = 0; i < kCompressionBlock; i += kLanes<float>) {
    const auto value = hn::ConvertTo(Floats(), hn::PromoteTo(Words(), hn::LoadU(Bytes(), in + i)));
    store<float>(hn::Add(load<float>(sum + i), hn::Mul(value, factor)), sum + i);
  }
}

void divide(float* values, float divisor) {
  const auto by = set<float>(static_cast<double>(divisor));
  map<float>(
      values, kCompressionBlock, [by](Vec<float> v) HWY_ATTR { return hn::Div(v, by); },
      static_cast<const float*>(values));
}

const CompressionTable* compression_table() {
  static constexpr CompressionTable table{&quantize, &add_quantized, &divide};
  return &table;
}

}  // namespace
}  // namespace tessera::nn::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::nn::kernels {
HWY_EXPORT(compression_table);
namespace {

constexpr std::size_t kBlock = kCompressionBlock;
static_assert(kElementTile % kBlock == 0);

const CompressionTable& table() { return *HWY_DYNAMIC_DISPATCH(compression_table)(); }

/// Calls function(first, count) for each block of [0, count).
template <class Function>
void for_blocks(ThreadPool& pool, std::size_t count, Function&& function) {
  for_tiles(pool, count, kElementTile, [&](std::size_t begin, std::size_t end) {
    for (std::size_t first = begin; first < end; first += kBlock) function(first, std::min(kBlock, end - first));
  });
}

std::byte* values_of(void* compressed, std::size_t count) {
  return static_cast<std::byte*>(compressed) + (count + kBlock - 1) / kBlock * sizeof(float);
}
std::byte* scale_of(void* compressed, std::size_t first) {
  return static_cast<std::byte*>(compressed) + first / kBlock * sizeof(float);
}

/// The encoding error. It is 0 for values that aren't finite, because error feedback would keep them forever.
float lost(float value, float decoded) { return std::isfinite(value - decoded) ? value - decoded : 0.0F; }

/// Encodes one block to its position in `out`; `decoded`: the values that a reader decodes.
void compress_block(const CompressArgs& a, std::size_t first, std::size_t count, const float* block, float* decoded) {
  if (a.compression == Compression::bf16) {
    auto* out = static_cast<base::bf16*>(a.out) + first;
    for (std::size_t i = 0; i < count; ++i) out[i] = base::bf16(block[i]);
    for (std::size_t i = 0; decoded != nullptr && i < count; ++i) decoded[i] = static_cast<float>(out[i]);
    return;
  }
  alignas(64) std::int8_t values[kBlock];
  const float scale = table().quantize(block, values);
  std::memcpy(scale_of(a.out, first), &scale, sizeof(scale));
  std::memcpy(values_of(a.out, a.count) + first, values, count);
  if (decoded != nullptr) table().add_quantized(values, scale, decoded);
}

void add_block(const SumCompressedArgs& a, std::size_t source, std::size_t first, std::size_t count, float* sum) {
  auto* const in = static_cast<std::byte*>(const_cast<void*>(a.in)) + source * a.stride;
  if (a.compression == Compression::bf16) {
    const auto* values = reinterpret_cast<const base::bf16*>(in) + first;
    for (std::size_t i = 0; i < count; ++i) sum[i] += static_cast<float>(values[i]);
    return;
  }
  alignas(64) std::int8_t values[kBlock] = {};
  std::memcpy(values, values_of(in, a.count) + first, count);
  float scale;
  std::memcpy(&scale, scale_of(in, first), sizeof(scale));
  table().add_quantized(values, scale, sum);
}

}  // namespace

void compress(ThreadPool& pool, const CompressArgs& a) {
  for_compute_dtype("encode", a.from, "", [&](auto zero) {
    using T = decltype(zero);
    for_blocks(pool, a.count, [&](std::size_t first, std::size_t count) {
      alignas(64) float block[kBlock] = {};
      const T* in = static_cast<const T*>(a.in) + first;
      for (std::size_t i = 0; i < count; ++i) block[i] = a.factor * static_cast<float>(in[i]);
      if (a.error == nullptr) return compress_block(a, first, count, block, nullptr);
      alignas(64) float decoded[kBlock] = {};
      for (std::size_t i = 0; i < count; ++i) block[i] += a.error[first + i];
      compress_block(a, first, count, block, decoded);
      for (std::size_t i = 0; i < count; ++i) a.error[first + i] = lost(block[i], decoded[i]);
    });
  });
}

void sum_compressed(ThreadPool& pool, const SumCompressedArgs& a) {
  for_compute_dtype("sum_encoded", a.to, "", [&](auto zero) {
    using T = decltype(zero);
    for_blocks(pool, a.count, [&](std::size_t first, std::size_t count) {
      alignas(64) float sum[kBlock];
      for (float& value : sum) value = -0.0F;  // -0 is the neutral element, also for the sign
      for (std::size_t source = 0; source < a.sources; ++source) add_block(a, source, first, count, sum);
      if (a.divisor != 1) table().divide(sum, a.divisor);
      T* out = static_cast<T*>(a.out) + first;
      for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<T>(sum[i]);
    });
  });
}

}  // namespace tessera::nn::kernels
#endif  // HWY_ONCE
