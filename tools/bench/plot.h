// `bench --plot`: latency and bus bandwidth over size, both axes logarithmic, as one self-contained SVG file.
#pragma once

#include <span>
#include <string>

#include "tools/bench/runner.h"

namespace tessera::tools {

/// Draws a row for each operation, with a panel for the time and one for busbw; each has a curve per backend, out of
/// place. Operations without sizes (barrier) and values of 0 can't be drawn. `caption` describes the measurement,
/// `machine` the machine.
std::string bench_plot(std::span<const BenchResult> results, const std::string& caption, const std::string& machine);

}  // namespace tessera::tools
