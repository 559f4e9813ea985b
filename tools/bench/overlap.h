// The share of an operation's time that computation can hide: `bench --overlap`, by the formula of the OSU
// micro-benchmarks.
#pragma once

#include "tools/bench/runner.h"

namespace tessera::tools {

/// Medians over iterations of the slowest rank's time, in microseconds.
struct OverlapTimes {
  double pure = 0;     ///< the operation alone
  double compute = 0;  ///< a computation of the same length alone
  double total = 0;    ///< start of the operation, the same computation, wait for the operation
};

/// max(0, 100 (1 - (total - compute) / pure)): 100 if the computation hides the operation, 0 if the two take as long as
/// one after the other. Noise can raise it above 100.
double overlap_percent(const OverlapTimes& times);

/// Arithmetic in registers without calls, so it advances no operation.
class Computation {
 public:
  /// Measures this core's speed.
  Computation();
  /// Computes for about this long.
  void run(double microseconds) const;

 private:
  double rounds_per_microsecond_ = 0;
};

/// Measures the three in turn in every iteration, so that a change of the machine's speed affects all. Collective;
/// `start` starts the operation, `compute` takes about as long.
OverlapTimes measure_overlap(comm::HostCollectives& world, const Repeats& repeats,
                             const std::function<comm::Work()>& start, const std::function<void()>& compute);

}  // namespace tessera::tools
