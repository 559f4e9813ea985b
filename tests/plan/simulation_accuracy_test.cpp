// Acceptance item 19: the simulated step time of a model that was not measured.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "tessera/comm/slow_link/slow_link.h"
#include "tessera/plan/topology.h"
#include "tests/harness/training.h"
#include "tests/plan/simulation_support.h"

namespace tessera::plan {
namespace {

using namespace fsdp;  // and of base
using harness::engine_for;

double milliseconds(std::int64_t ns) { return static_cast<double>(ns) / 1e6; }

/// The fastest step after the first. Machines that run tests are busy, and a step is long enough to be interrupted; a
/// kernel, whose median time is used, is not.
StepTimes fastest(StepProfile record) {
  record.steps.erase(record.steps.begin());
  return *std::min_element(record.steps.begin(), record.steps.end(),
                           [](const StepTimes& a, const StepTimes& b) { return a.step_ns < b.step_ns; });
}

/// Links without computation, with a transfer time close to a unit's compute time.
constexpr comm::SlowLink kLink{.latency = std::chrono::milliseconds(3), .bytes_per_second = 100e6};

std::unique_ptr<comm::Communicator> slowed(std::unique_ptr<comm::Communicator> world) {
  return comm::slow_links(std::move(world), {.link = kLink, .intra = {}, .hosts = 1});
}

/// @param times factor on the time of every operation; 1 for the links of the measurement
Network those_links(int times = 1) {
  Topology topology;
  topology.bytes_per_second = kLink.bytes_per_second / times;
  topology.latency_s = std::chrono::duration<double>(kLink.latency).count() * times;
  topology.domains = {{.ranks = 2, .bytes_per_second = topology.bytes_per_second, .latency_s = topology.latency_s}};
  topology.sharing = LinkSharing::in_order;
  topology.in_order = false;
  topology.algorithms = comm::AlgorithmTable(
      "all_gather=direct,reduce_scatter=direct,all_reduce=direct,broadcast=direct", simulated_algorithms());
  return cluster(topology, 2);
}

/// How much slower the links of the negative control are. Each strategy exposes at least the last operation of a step,
/// of 3 ms and more: ten times that is wrong by at least 27 ms of a step of about 55 ms, whatever else runs meanwhile.
constexpr int kControl = 10;

class PredictionAccuracy : public testing::TestWithParam<std::string> {
 protected:
  static TrainingStep step_for(std::int64_t layers, std::int64_t width, const EngineOptions& engine) {
    TrainingStep step = step_of(config_of(layers, width), engine, 64);
    step.samples = 4;
    return step;
  }
  /// Measured on models smaller and larger than the simulated one.
  KernelCostModel kernels() const {
    KernelCostModel times;
    for (const std::int64_t width : {96, 192})
      times.merge(measured_on(2, GetParam(), step_for(2, width, engine_for("fsdp")), 8).kernels);
    return times;
  }
};

/// Bound on the difference between simulated and measured times of a model that was not measured, as a share of the
/// step.
constexpr double kError = 0.15;
/// kGood of kAttempts attempts must be within the bound. The others may miss it, because other programs use the machine
/// during one of the two measurements. A wrong planner misses it in all attempts; a quiet machine needs kGood only.
constexpr int kAttempts = 20;
constexpr int kGood = 3;

double error(const StepTimes& predicted, const StepTimes& real) {
  const auto share = [&](std::int64_t a, std::int64_t b) {
    return std::abs(milliseconds(a) - milliseconds(b)) / milliseconds(real.step_ns);
  };
  return std::max(share(predicted.step_ns, real.step_ns), share(predicted.exposed_ns, real.exposed_ns));
}

std::string text_of(const StepTimes& times) {
  return "step " + std::to_string(milliseconds(times.step_ns)) + " ms, of which exposed " +
         std::to_string(milliseconds(times.exposed_ns)) + " ms";
}

TEST_P(PredictionAccuracy, P19_PredictsStepAndExposedTimeOfUnmeasuredModel) {
  KernelCostModel times = kernels();
  for (const auto& [name, prefetch] : {std::pair("ddp", 1), std::pair("zero1", 1), std::pair("zero2", 1),
                                       std::pair("fsdp", 1), std::pair("fsdp", 0)}) {
    EngineOptions engine = engine_for(name);
    engine.prefetch = prefetch;
    const TrainingStep step = step_for(5, 128, engine);
    int good = 0, worse = 0, attempts = 0;
    for (; attempts < kAttempts && good < kGood && attempts - good <= kAttempts - kGood; ++attempts) {
      if (attempts > 0) times = kernels();
      const StepTimes predicted = predict_on(2, step, times, those_links()).steps.back();
      const StepTimes control = predict_on(2, step, times, those_links(kControl)).steps.back();
      const StepTimes real = fastest(measured_on(2, GetParam(), step, 16, slowed));
      if (error(predicted, real) <= kError) {
        ++good;
        worse += error(control, real) > kError ? 1 : 0;
      }
      std::cout << name << ", prefetch " << prefetch << ": predicted " << text_of(predicted) << "; measured "
                << text_of(real) << "\n";
    }
    EXPECT_GE(good, kGood) << "of " << attempts << " attempts: " << name << " " << prefetch;
    EXPECT_EQ(worse, good) << name << " " << prefetch;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, PredictionAccuracy, testing::Values("shm", "tcp"),
                         [](const auto& test) { return test.param; });

}  // namespace
}  // namespace tessera::plan
