// NF4: four bits a value, at the quantiles of a normal distribution, with doubly quantised scales.
//
// Source: T. Dettmers et al., "QLoRA", arXiv 2305.14314, sections 3 and 3.1. Blocks of 64 values share a scale, their
// largest magnitude. Scales have 8 bits: blocks of 256 of them share one f32, and all are measured from their mean. So
// a value takes 4 + 8 / 64 + 32 / (64 * 256) bits, and 32 bits more for each tensor.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/base/export.h"
#include "tessera/nn/init.h"

namespace tessera::nn {

inline constexpr std::int64_t kNf4Block = 64;        ///< values with one scale
inline constexpr std::int64_t kNf4ScaleBlock = 256;  ///< scales with one scale

/// What the sixteen codes stand for: in rising order, -1, 0 and 1 among them.
TESSERA_API extern const std::array<float, 16> kNf4Levels;

/// Bytes of an encoding: the mean of the scales and the scales' scales (f32), scales (i8), codes (the lower half of a
/// byte first), of a tensor of `count` values. Little-endian.
TESSERA_API std::size_t nf4_bytes(std::int64_t count);

/// Encodes a whole tensor into nf4_bytes(values.size()) at `out`; any alignment. Each value gets the level next to it
/// under the scale that its block really gets. Throws InvalidUsage for one that isn't finite.
TESSERA_API void encode_nf4(std::span<const float> values, std::byte* out);

/// Elements `range` of an encoded tensor of `count` values.
TESSERA_API void decode_nf4(const std::byte* encoded, std::int64_t count, ElementRange range, float* out);

}  // namespace tessera::nn
