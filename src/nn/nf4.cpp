#include "tessera/nn/nf4.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::nn {

namespace {

void require_bytes(std::size_t bytes, const Nf4Layout& parts, std::int64_t count) {
  if (bytes != parts.end)
    throw base::InvalidUsage("nf4: " + std::to_string(count) + " values have " + std::to_string(parts.end) +
                             " bytes, not " + std::to_string(bytes));
}

float f32_at(const std::byte* encoded, std::int64_t index) {
  float value = 0;
  std::memcpy(&value, encoded + static_cast<std::size_t>(index) * sizeof(float), sizeof(float));
  return value;
}

/// The decoded scale of a block. Rounding must not make it negative.
float scale_of(const std::byte* encoded, const Nf4Layout& parts, std::int64_t block) {
  const float step = f32_at(encoded, 1 + block / kNf4ScaleBlock);
  const auto code = static_cast<std::int8_t>(encoded[parts.scales + static_cast<std::size_t>(block)]);
  return std::max(f32_at(encoded, 0) + step * static_cast<float>(code), 0.0F);
}

std::vector<float> largest_of_blocks(std::span<const float> values) {
  std::vector<float> largest(static_cast<std::size_t>(Nf4Layout(static_cast<std::int64_t>(values.size())).blocks));
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i]))
      throw base::InvalidUsage("nf4: value " + std::to_string(i) + " is " + std::to_string(values[i]) +
                               "; all must be finite");
    float& most = largest[i / static_cast<std::size_t>(kNf4Block)];
    most = std::max(most, std::abs(values[i]));
  }
  return largest;
}

void encode_scales(const std::vector<float>& largest, const Nf4Layout& parts, std::byte* out) {
  double sum = 0;
  for (const float value : largest) sum += value;
  const auto mean = static_cast<float>(largest.empty() ? 0.0 : sum / static_cast<double>(largest.size()));
  std::memcpy(out, &mean, sizeof(mean));
  for (std::int64_t group = 0; group < parts.scale_blocks; ++group) {
    const auto first = static_cast<std::size_t>(group * kNf4ScaleBlock);
    const std::size_t end = std::min(first + static_cast<std::size_t>(kNf4ScaleBlock), largest.size());
    float most = 0;
    for (std::size_t i = first; i < end; ++i) most = std::max(most, std::abs(largest[i] - mean));
    const float step = most / 127.0F;
    std::memcpy(out + sizeof(float) * static_cast<std::size_t>(1 + group), &step, sizeof(step));
    for (std::size_t i = first; i < end; ++i) {
      const float code = step > 0 ? std::nearbyint((largest[i] - mean) / step) : 0.0F;
      out[parts.scales + i] = static_cast<std::byte>(static_cast<std::int8_t>(std::clamp(code, -127.0F, 127.0F)));
    }
  }
}

unsigned nearest_level(float x) {
  unsigned code = 0;
  while (code < 15 && x > (kNf4Levels[code] + kNf4Levels[code + 1]) / 2) ++code;
  return code;
}

}  // namespace

void encode_nf4(std::span<const float> values, std::span<std::byte> bytes) {
  const Nf4Layout parts(static_cast<std::int64_t>(values.size()));
  require_bytes(bytes.size(), parts, static_cast<std::int64_t>(values.size()));
  std::byte* const out = bytes.data();
  encode_scales(largest_of_blocks(values), parts, out);
  std::fill(out + parts.codes, out + parts.end, std::byte{0});
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float scale = scale_of(out, parts, static_cast<std::int64_t>(i) / kNf4Block);
    const unsigned code = nearest_level(scale > 0 ? values[i] / scale : 0.0F);
    out[parts.codes + i / 2] |= static_cast<std::byte>(code << (i % 2 * 4));
  }
}

void decode_nf4(std::span<const std::byte> bytes, std::int64_t count, ElementRange range, float* out) {
  const Nf4Layout parts(count);
  require_bytes(bytes.size(), parts, count);
  if (range.begin < 0 || range.end > count)
    throw base::InvalidUsage("nf4: elements " + std::to_string(range.begin) + " to " + std::to_string(range.end) +
                             " of a tensor of " + std::to_string(count));
  const std::byte* const encoded = bytes.data();
  for (std::int64_t i = range.begin; i < range.end;) {
    const float scale = scale_of(encoded, parts, i / kNf4Block);
    const std::int64_t end = std::min(range.end, (i / kNf4Block + 1) * kNf4Block);
    for (; i < end; ++i) {
      const auto pair = std::to_integer<unsigned>(encoded[parts.codes + static_cast<std::size_t>(i / 2)]);
      out[i - range.begin] = scale * kNf4Levels[(pair >> (i % 2 * 4)) & 15U];
    }
  }
}

}  // namespace tessera::nn
