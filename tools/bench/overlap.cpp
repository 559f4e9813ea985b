#include "tools/bench/overlap.h"

#include <algorithm>
#include <array>

namespace tessera::tools {
namespace {

/// Eight chains, as many as a core can have in flight. The result is a value that the compiler can't predict.
void run_chains(std::int64_t rounds) {
  std::array<double, 8> chains = {1, 2, 3, 4, 5, 6, 7, 8};
  for (std::int64_t i = 0; i < rounds; ++i)
    for (double& x : chains) x = x * 0.999999 + 1e-6;
  for (double& x : chains) asm volatile("" : "+m"(x));
}

}  // namespace

double overlap_percent(const OverlapTimes& times) {
  if (times.pure <= 0) return 0;
  return std::max(0.0, 100 * (1 - (times.total - times.compute) / times.pure));
}

Computation::Computation() {
  constexpr std::int64_t kTimedRounds = 20'000;
  constexpr int kAttempts = 20;  // the fastest counts: the others were interrupted
  double best = 1e9;
  for (int i = 0; i < kAttempts; ++i) {
    const std::int64_t start = base::host_time_ns();
    run_chains(kTimedRounds);
    best = std::min(best, static_cast<double>(std::max<std::int64_t>(1, base::host_time_ns() - start)) * 1e-3);
  }
  rounds_per_microsecond_ = static_cast<double>(kTimedRounds) / best;
}

void Computation::run(double microseconds) const {
  run_chains(std::max<std::int64_t>(1, static_cast<std::int64_t>(microseconds * rounds_per_microsecond_)));
}

OverlapTimes measure_overlap(comm::HostCollectives& world, const Repeats& repeats,
                             const std::function<comm::Work()>& start, const std::function<void()>& compute) {
  std::vector<double> pure;
  std::vector<double> alone;
  std::vector<double> total;
  for (int i = -repeats.warmup; i < repeats.iterations; ++i) {
    const double p = time_once(world, repeats, [&] { start().wait(); });
    const double a = time_once(world, repeats, compute);
    const double t = time_once(world, repeats, [&] {
      comm::Work work = start();
      compute();
      work.wait();
    });
    if (i < 0) continue;
    pure.push_back(p);
    alone.push_back(a);
    total.push_back(t);
  }
  for (auto* samples : {&pure, &alone, &total}) reduce_to_slowest(world, *samples);
  return {bench_times(pure).median, bench_times(alone).median, bench_times(total).median};
}

}  // namespace tessera::tools
