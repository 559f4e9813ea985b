#include "tools/plan/device_profile.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace tessera::tools {
namespace {

constexpr double kStreaming = 0.85;       // part of the memory's rate that streaming kernels reach
constexpr double kLongestProduct = 0.97;  // efficiency of the shapes by which the best rates were measured
constexpr double kA100 = 271.2e12 / kLongestProduct, kH100 = 794.5e12 / kLongestProduct;

constexpr DeviceProfile a100(std::string_view name, double memory_rate, double capacity) {
  return {name, 108, kA100, 150, memory_rate * kStreaming, 227e9, 0.87, capacity, false};
}
constexpr DeviceProfile h100(std::string_view name, double memory_rate, double prior) {
  return {name, 132, kH100, 280, memory_rate * kStreaming, 360e9, prior, 80e9, true};
}

constexpr std::array kDevices = {
    a100("A100-80GB", 2.0e12, 80e9),
    a100("A100-40GB", 1.555e12, 40e9),
    a100("A100", 2.0e12, 80e9),
    DeviceProfile{"A100-80GB-PCIe", 108, 252.9e12 / kLongestProduct, 150, 1.94e12 * kStreaming, 20e9, 0.80, 80e9},
    h100("H100-80GB", 3.35e12, 0.80),
    h100("H100", 3.35e12, 0.80),
    h100("H200-SXM", 4.8e12, 0.80),
    h100("GH200", 4.0e12, 0.80),
    h100("H100-96GB-HBM2e-500W", 2.4e12, 0.68),
    h100("H100-95GiB", 2.4e12, 0.68),
};

/// An output tile, and its rate as a part of that of the largest ones.
struct Tile {
  std::int64_t rows, columns;
  double rate;
};
constexpr std::array kTiles = {Tile{128, 256, 1}, Tile{256, 128, 1}, Tile{128, 128, 0.92}, Tile{128, 64, 0.80},
                               Tile{64, 64, 0.62}};
constexpr std::array<std::int64_t, 7> kSplits = {1, 2, 3, 4, 6, 8, 16};

std::int64_t parts(std::int64_t size, std::int64_t part) { return (size + part - 1) / part; }

/// Rounds in which the multiprocessors compute `tiles`. The tiles of a partial last one are a little faster.
double waves(std::int64_t tiles, int multiprocessors) {
  const std::int64_t full = tiles / multiprocessors, rest = tiles % multiprocessors;
  if (full == 0) return 1;
  return static_cast<double>(full) + (rest == 0 ? 0 : 0.75 + 0.25 * static_cast<double>(rest) / multiprocessors);
}

/// Rate of the attention of one generation and implementation, for heads of up to 64 elements and for longer ones.
struct AttentionRate {
  double forward[2], backward[2];
  double half_length;  ///< positions at which half of the rate is reached
};

const AttentionRate& attention_rate(bool hopper, AttentionKernel kernel) {
  static constexpr AttentionRate kRates[2][3] = {{{{130e12, 130e12}, {83e12, 83e12}, 350},
                                                  {{125e12, 120e12}, {85e12, 85e12}, 350},
                                                  {{195e12, 215e12}, {171e12, 187e12}, 540}},
                                                 {{{235e12, 235e12}, {150e12, 150e12}, 350},
                                                  {{215e12, 210e12}, {145e12, 145e12}, 350},
                                                  {{320e12, 370e12}, {285e12, 285e12}, 540}}};
  const int column = kernel == AttentionKernel::triton ? 0 : kernel == AttentionKernel::flash1 ? 1 : 2;
  return kRates[hopper ? 1 : 0][column];
}

/// The head size that the kernel computes: the next one of those it has.
double padded_head(std::int64_t head_dim) {
  for (const int size : {64, 96, 128})
    if (head_dim <= size) return size;
  return 256;
}

}  // namespace

const DeviceProfile& device_profile(const std::string& name) {
  for (const DeviceProfile& device : kDevices)
    if (device.name == name) return device;
  if (name.find("H200") != std::string::npos) return device_profile("H200-SXM");
  return device_profile(name.find("H100") != std::string::npos ? "H100" : "A100");
}

ProductTime product_time(const DeviceProfile& device, const ProductSize& size) {
  const auto m = static_cast<double>(size.m), n = static_cast<double>(size.n), k = static_cast<double>(size.k),
             batch = static_cast<double>(size.batch);
  const double rate = device.product_flops / device.multiprocessors;
  double best = HUGE_VAL;
  for (const Tile& tile : kTiles) {
    const std::int64_t tiles = parts(size.m, tile.rows) * parts(size.n, tile.columns) * size.batch;
    for (const std::int64_t split : kSplits) {
      const double depth = k / static_cast<double>(split);
      if (split > 1 && (depth < 512 || tiles * split > 4 * device.multiprocessors)) break;
      double seconds = waves(tiles * split, device.multiprocessors) * static_cast<double>(tile.rows * tile.columns) *
                       2 * (depth + device.tile_start) / (rate * tile.rate);
      if (split > 1) seconds += static_cast<double>(split + 1) * m * n * batch * 4 / device.memory_rate + kKernelGap;
      best = std::min(best, seconds);
    }
  }
  const double floor = 2 * batch * (m * k + k * n + m * n) * 1.1 / device.memory_rate;
  return floor > best ? ProductTime{floor, true} : ProductTime{best, false};
}

double fused_attention_time(const DeviceProfile& device, AttentionKernel kernel, const AttentionSize& size,
                            bool backward) {
  const AttentionRate& rates = attention_rate(device.hopper, kernel);
  const int column = size.head_dim <= 64 ? 0 : 1;
  double rate = (backward ? rates.backward : rates.forward)[column];
  if (size.head_dim != 64 && size.head_dim != 128)
    rate *= static_cast<double>(size.head_dim) / padded_head(size.head_dim);
  const auto elements = static_cast<double>(size.heads * size.positions * size.head_dim);
  double flops = 2 * elements * (static_cast<double>(size.positions) + rates.half_length);
  if (backward) flops *= 2.5;
  const double bytes = elements * 2 * (backward ? 16 : 4);
  return std::max(flops / rate, bytes / device.memory_rate) + kKernelGap * (backward ? 3 : 1);
}

}  // namespace tessera::tools
