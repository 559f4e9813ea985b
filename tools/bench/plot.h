// `bench --plot`: latency and bus bandwidth over size, both axes logarithmic, as one SVG file that needs nothing else.
#pragma once

#include <span>
#include <string>

#include "tools/bench/runner.h"

namespace tessera::tools {

/// A row for each operation, with a panel for the time and one for busbw; in each a curve per backend, out of place.
/// Operations without sizes (barrier) and values of 0 can't be drawn. `caption` says how it was measured,
/// `machine` where.
std::string bench_plot(std::span<const BenchResult> results, const std::string& caption, const std::string& machine);

}  // namespace tessera::tools
