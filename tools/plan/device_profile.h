// How fast the kernels of a GPU are, by shape. docs/plan.md lists the figures with their sources.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera::tools {

/// A GPU model. Rates are those of its data sheet or measured with long products.
struct DeviceProfile {
  std::string_view name;
  int multiprocessors = 1;
  double product_flops = 0;    ///< of products, without the losses that come from their shape
  double tile_start = 0;       ///< start and end of an output tile, as a length of the inner dimension
  double memory_rate = 0;      ///< bytes per second that streaming kernels reach
  double link_rate = 0;        ///< of 8 ranks on one host, in bytes per second
  double product_prior = 0;    ///< efficiency of products before it is fitted
  double memory_capacity = 0;  ///< bytes
  bool hopper = false;         ///< of the H100's generation; else of the A100's
};

/// The profile of a name such as "H100-80GB". A name that is not known has that of its generation.
const DeviceProfile& device_profile(const std::string& name);

inline constexpr double kKernelGap = 2e-6;  ///< seconds between two kernels of a busy stream

/// Seconds of `batch` products of (m x k) by (k x n) at full efficiency; `memory`: the time is that of their bytes.
struct ProductTime {
  double seconds = 0;
  bool memory = false;
};
struct ProductSize {
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
};
ProductTime product_time(const DeviceProfile& device, const ProductSize& size);

/// Which implementation of attention computes the scores.
enum class AttentionKernel : std::uint8_t { unfused, triton, flash1, flash2 };

/// Causal attention of `heads` (of all sequences) with `positions` each.
struct AttentionSize {
  std::int64_t heads = 0, positions = 0, head_dim = 0;
};
/// Seconds of an implementation that doesn't store the scores.
double fused_attention_time(const DeviceProfile& device, AttentionKernel kernel, const AttentionSize& size,
                            bool backward);

}  // namespace tessera::tools
