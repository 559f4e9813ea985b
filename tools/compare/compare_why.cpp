#include "tools/compare/compare_why.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/fsdp/collective_plugin.h"
#include "tessera/fsdp/plugin.h"
#include "tessera/fsdp/strategy.h"
#include "tools/results/statistics.h"

namespace tessera::tools {

using base::InvalidUsage;

namespace {

/// Bytes per second of links that only record.
constexpr double kNoLimit = 1e15;

/// What the simulations start from; only the ratio of its two speeds stays.
constexpr MachineSpec kUncalibrated{.flops = 50e9, .bytes_per_second = 10e9};

}  // namespace

void record_waits(TrainPlan& plan) {
  if (base::parse_device(plan.options.device).type != base::DeviceType::cpu)
    throw InvalidUsage("--why: only waits of ranks on the cpu can be told apart, not on device " + plan.options.device);
  if (!plan.links) {
    plan.links = {.link = {{}, kNoLimit}, .intra = {}};
    plan.fits_links = true;
  }
  plan.links->record = true;
}

comm::SlowLinks apply_link_fits(const std::vector<RunResult*>& runs) {
  std::vector<double> latencies, seconds_per_byte;
  for (const RunResult* run : runs) {
    latencies.push_back(run->link_fit.value().latency_us);
    seconds_per_byte.push_back(1 / run->link_fit.value().bytes_per_second);
  }
  const double latency_us = median(std::move(latencies));
  const double rate = 1 / median(std::move(seconds_per_byte));
  for (RunResult* run : runs) {
    const PerCollective& bytes = run->wire_bytes_per_step;
    const PerCollective& calls = run->calls_per_step;
    StepParts& parts = run->parts.value();
    parts.volume = static_cast<double>(bytes.all_gather + bytes.reduce_scatter + bytes.all_reduce) / rate * 1e3;
    parts.latency =
        static_cast<double>(calls.all_gather + calls.reduce_scatter + 2 * calls.all_reduce) * latency_us * 1e-3;
    parts.exposed += parts.transport;
    parts.transport = 0;
  }
  return {.link = {std::chrono::nanoseconds(std::llround(latency_us * 1e3)), rate}, .intra = {}};
}

Why measured_why(const PlannedRun& from, const PlannedRun& to,
                 const std::pair<std::vector<StepParts>, std::vector<StepParts>>& parts, const comm::SlowLinks& links) {
  Why why = explain_gap(parts.first, parts.second);
  why.from = from.name;
  why.to = to.name;
  why.link = link_words(links);
  const StepParts a = mean_of(parts.first), b = mean_of(parts.second);
  const LinkedMachine start{links, kUncalibrated, from.plan.ranks};
  if (!from.plan.can_be_simulated) return why;
  why.helps = what_helps(from, to, calibrated(start, from, to, a.compute + a.optimizer + b.compute + b.optimizer));
  return why;
}

}  // namespace tessera::tools
