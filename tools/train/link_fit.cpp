#include "tools/train/link_fit.h"

#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "tools/results/statistics.h"

namespace tessera::tools {
namespace {

constexpr int kWarmUps = 3, kRepeats = 15;
constexpr std::array<std::size_t, 6> kBytes = {256, 2048, 16384, 65536, 131072, 262144};  // that each rank has
constexpr double kNoLimit = 1e15;  // bytes per second of links whose bytes take no time that shows

/// Microseconds of an all_gather, the median of several.
double gather_us(comm::Communicator& world, std::size_t bytes) {
  const base::Buffer in = world.allocate(bytes, comm::MemoryKind::host, base::MemoryCategory::communication);
  const base::Buffer out = world.allocate(bytes * static_cast<std::size_t>(world.size()), comm::MemoryKind::host,
                                          base::MemoryCategory::communication);
  std::vector<double> times;
  for (int i = 0; i < kWarmUps + kRepeats; ++i) {
    world.barrier().wait();
    const auto start = std::chrono::steady_clock::now();
    world.all_gather({in.data(), in.bytes(), base::DType::u8, {}}, {out.data(), out.bytes(), base::DType::u8, {}})
        .wait();
    const std::chrono::duration<double, std::micro> time = std::chrono::steady_clock::now() - start;
    if (i >= kWarmUps) times.push_back(time.count());
  }
  return median(std::move(times));
}

}  // namespace

LinkSpec fit_link(comm::Communicator& world) {
  if (world.size() == 1) return {0, kNoLimit};
  std::vector<double> times;
  for (const std::size_t bytes : kBytes) times.push_back(gather_us(world, bytes));
  const comm::View view = comm::view_of(times.data(), times.size());
  world.all_reduce(view, view, comm::ReduceOp::max(), {.label = "link fit"}).wait();
  std::vector<FitPoint> points;
  for (std::size_t i = 0; i < kBytes.size(); ++i)
    points.push_back({static_cast<double>(kBytes[i] * static_cast<std::size_t>(world.size() - 1)), times[i]});
  const AlphaBetaFit fit = fit_alpha_beta(points).value();
  return {fit.alpha_us, fit.beta_us_per_byte > 0 ? 1e6 / fit.beta_us_per_byte : kNoLimit};
}

}  // namespace tessera::tools
