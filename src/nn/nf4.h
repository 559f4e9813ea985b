// NF4: four bits per value, at the quantiles of a normal distribution, with doubly quantized scales.
//
// Source: T. Dettmers et al., "QLoRA", arXiv 2305.14314, sections 3 and 3.1. A block of 64 values shares a scale: its
// largest magnitude. A scale has 8 bits: a block of 256 scales shares one f32 scale, and all are stored relative to
// their mean. A value thus occupies 4 + 8 / 64 + 32 / (64 * 256) bits, plus 32 bits for each tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/base/export.h"
#include "tessera/nn/init.h"

namespace tessera::nn {

inline constexpr std::int64_t kNf4Block = 64;        ///< values per scale
inline constexpr std::int64_t kNf4ScaleBlock = 256;  ///< scales per second-level scale

/// Values of the sixteen codes, ascending, -1, 0 and 1 among them. They are quantiles of the normal distribution: 8
/// from 1/2 down to the tail below zero, 9 above, with zero in both, divided by the largest of them. The tail is the
/// mean of 1 / (2 * 15) and 1 / (2 * 16); tests/nn/nf4_test.cpp derives them.
inline constexpr std::array<float, 16> kNf4Levels = {
    -1.0F,       -0.69619280F, -0.52507305F, -0.39491749F, -0.28444138F, -0.18477343F, -0.09105004F, 0.0F,
    0.07958030F, 0.16093020F,  0.24611230F,  0.33791524F,  0.44070983F,  0.56261700F,  0.72295684F,  1.0F};

/// Byte offsets of the parts of an encoding of `count` values: the mean of the scales and the second-level scales
/// (f32), scales (i8), codes (the lower half of a byte first). Little-endian.
/// The scale of a block is max(mean + scale * second-level scale, 0); a value is that times the level of its code.
struct Nf4Layout {
  /// The layout of an encoding of `count` values.
  constexpr explicit Nf4Layout(std::int64_t count)
      : blocks((count + kNf4Block - 1) / kNf4Block),
        scale_blocks((blocks + kNf4ScaleBlock - 1) / kNf4ScaleBlock),
        scales(sizeof(float) * static_cast<std::size_t>(1 + scale_blocks)),
        codes(scales + static_cast<std::size_t>(blocks)),
        end(codes + static_cast<std::size_t>((count + 1) / 2)) {}
  std::int64_t blocks,  ///< blocks, each with a scale
      scale_blocks;     ///< blocks of scales
  std::size_t scales,   ///< offset of the scales, in bytes
      codes,            ///< offset of the codes
      end;              ///< bytes in total
};

/// Bytes of an encoding of `count` values.
constexpr std::size_t nf4_bytes(std::int64_t count) { return Nf4Layout(count).end; }

/// Encodes a whole tensor into `bytes`, which has nf4_bytes(values.size()) bytes of any alignment. Each value gets the
/// nearest level under its block's quantized scale. Throws InvalidUsage for values that aren't finite, and for another
/// length of `bytes`.
TESSERA_API void encode_nf4(std::span<const float> values, std::span<std::byte> bytes);

/// Decodes elements `range` of an encoded tensor of `count` values. Throws InvalidUsage if it has not nf4_bytes(count)
/// bytes, or if the range lies outside.
TESSERA_API void decode_nf4(std::span<const std::byte> bytes, std::int64_t count, ElementRange range, float* out);

}  // namespace tessera::nn
