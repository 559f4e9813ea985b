// The timing loop of `bench`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/base/stream.h"
#include "tessera/comm/host_collectives.h"

namespace tessera::tools {

struct Repeats {
  int warmup = 0;
  int iterations = 1;
  /// Called before each call, outside its time; may be empty.
  std::function<void()> prepare = {};
};

/// For secondary measurements: as many repeats as a median needs.
inline Repeats fewer(const Repeats& repeats) { return {1, std::clamp(repeats.iterations / 2, 3, 20), repeats.prepare}; }

/// Replaces every sample by that of the slowest rank. Collective.
inline void take_slowest(comm::HostCollectives& world, std::vector<double>& samples) {
  world.all_reduce(samples.data(), samples.size(), comm::ReduceOp::max(), "bench");
}

/// This rank's microseconds for one call of `body`, which starts after a barrier. Collective.
template <class F>
double time_once(comm::HostCollectives& world, const Repeats& repeats, F&& body) {
  if (repeats.prepare) repeats.prepare();
  world.communicator().barrier().wait();
  const std::int64_t start = base::host_time_ns();
  body();
  return static_cast<double>(base::host_time_ns() - start) * 1e-3;
}

/// The slowest rank's time of each iteration, in microseconds. Collective.
template <class F>
std::vector<double> measure(comm::HostCollectives& world, const Repeats& repeats, F&& body) {
  std::vector<double> samples;
  samples.reserve(static_cast<std::size_t>(repeats.iterations));
  for (int i = -repeats.warmup; i < repeats.iterations; ++i) {
    const double time = time_once(world, repeats, body);
    if (i >= 0) samples.push_back(time);
  }
  take_slowest(world, samples);
  return samples;
}

}  // namespace tessera::tools
