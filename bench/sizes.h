// The sizes of a GPT-2 and of its batch, for benchmarks.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bench {

/// By default those of gpt2 with 124 million parameters.
struct Sizes {
  std::size_t batch = 16, positions = 1024, width = 768, heads = 12, layers = 12, vocabulary = 50257;
  std::size_t rows() const { return batch * positions; }
  std::size_t parameters() const {
    return (vocabulary + positions) * width + layers * (12 * width * width + 13 * width) + 2 * width;
  }
};

/// One id for each row. The k-th most frequent one occurs about 1 / k as often as the first (Zipf's law).
inline std::vector<std::int32_t> ids_as_in_text(const Sizes& sizes) {
  std::vector<std::int32_t> ids;
  for (std::size_t i = 0; i < sizes.rows(); ++i) {
    const double quantile = static_cast<double>(i * 2654435761U % (1U << 24)) / (1U << 24);
    ids.push_back(static_cast<std::int32_t>(std::pow(static_cast<double>(sizes.vocabulary), quantile)) - 1);
  }
  return ids;
}

}  // namespace bench
