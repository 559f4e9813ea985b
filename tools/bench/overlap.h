// How much of an operation's time computing can hide: `bench --overlap`, by the formula of the OSU micro-benchmarks.
#pragma once

#include "tools/bench/measure.h"

namespace tessera::tools {

/// Medians over iterations of the slowest rank's time, in microseconds.
struct OverlapTimes {
  double pure = 0;     ///< the operation alone
  double compute = 0;  ///< as long a computation alone
  double total = 0;    ///< the operation started, the same computation, the operation awaited
};

/// max(0, 100 (1 - (total - compute) / pure)): 100 where the computation hides the operation, 0 where the two take as
/// long as one after the other. Noise can lift it above 100.
double overlap_percent(const OverlapTimes& times);

/// Arithmetic in registers: calls nothing, so it moves no operation on.
class Computation {
 public:
  /// Measures this core's speed.
  Computation();
  /// Computes for about this long.
  void run(double microseconds) const;

 private:
  double rounds_per_microsecond_ = 0;
};

/// The three in turn, in every iteration, so that a change of the machine's speed meets all. Collective; `start` begins
/// the operation, `compute` takes about as long.
OverlapTimes measure_overlap(comm::HostCollectives& world, const Repeats& repeats,
                             const std::function<comm::Work()>& start, const std::function<void()>& compute);

}  // namespace tessera::tools
