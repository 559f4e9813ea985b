// `tessera bench --duration` and `--endless`: the same operations again and again, and what changes over time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tools/bench/buffers.h"
#include "tools/bench/runner.h"

namespace tessera::tools {

/// One rank's part.
class LongRun {
 public:
  /// All arguments outlive it, and `plan` has a long_run. `measured` has the ranks of `control`.
  LongRun(const BenchSpec& plan, comm::HostCollectives& control, comm::Communicator& measured, BenchMemory& memory)
      : plan_(plan), control_(control), measured_(measured), memory_(memory) {}

  /// Adds all sizes of an operation, out of place, with this dtype and reduction. Collective.
  void add(const BenchOp& op, const BenchData& data);
  /// Collective: measures until the time is over. Calls `on_interval` on rank 0 with {"time", "seconds", "points":
  /// [{"op", "bytes", "dtype", "redop", "calls", "median_us", "p90_us", "p99_us", "max_us"}], "stall_count", "stalls":
  /// [{"time", "op", "bytes", "dtype", "redop", "us", "median_us"}]}.
  void run(const std::function<void(const nlohmann::ordered_json&)>& on_interval);

 private:
  struct Point {
    nlohmann::ordered_json name;  ///< op, bytes, dtype and redop
    BenchCall call;
    int messages = 1;
    double usual_us = 0;  ///< the median of the first calls
    // Of this interval, on rank 0 only:
    std::vector<double> samples;
    std::uint64_t calls = 0;
    double max_us = 0;
  };
  void measure_some(Point& point);
  nlohmann::ordered_json interval(double seconds);

  const BenchSpec& plan_;
  comm::HostCollectives& control_;
  comm::Communicator& measured_;
  BenchMemory& memory_;
  std::vector<std::unique_ptr<BenchBuffers>> buffers_;
  std::vector<Point> points_;
  nlohmann::ordered_json stalls_ = nlohmann::ordered_json::array();
  std::uint64_t stall_count_ = 0;
};

/// Adds to each point of the last of these intervals its drift: how much longer its median is than in the first one,
/// as a share. Returns the interval as a line that begins with #.
std::string long_run_line(nlohmann::ordered_json& intervals);

}  // namespace tessera::tools
