// Measures what a rank of this machine computes with, for `bench --cluster`.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tools/bench/kernel_sampler.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// A step of a small model, measured to learn the machine's times.
struct CalibrationStep {
  nn::ModelConfig model;
  base::DType dtype = base::DType::f32;
  std::int64_t seq_len = 0;
  plan::TrainingStep step;
  /// Also timed without the sampler, to learn what a step costs besides its kernels.
  bool timed = false;
};

/// Models of both families whose kernels have sizes from those of gpt-nano to those of gpt-mini, in f32 and bf16.
std::vector<CalibrationStep> calibration_steps(int threads);

/// What a step costs besides its kernels: time = factor * kernels + calls * latency.
struct HostOverhead {
  double factor = 1;
  double latency_us = 0;
};

/// One step of a world of one rank, in seconds.
struct OverheadSample {
  double step = 0;
  double kernels = 0;  ///< the sum of their times
  double calls = 0;    ///< of kernels
};

/// Fits both over the samples; with fewer than three different ones, or a fit without kernels, no overhead.
HostOverhead fit_overhead(const std::vector<OverheadSample>& samples);

struct ComputeMeasurement {
  int threads = 1;                              ///< of each rank
  int most_steps = 1;                           ///< of a model
  std::function<void(const std::string&)> say;  ///< called with a line before each model
};

/// Collective: all ranks of `world` compute at once, as in training. The result of rank 0 counts. Sets all fields but
/// memory_bytes.
ComputeSpec measure_compute(comm::Communicator& world, const ComputeMeasurement& measurement);

/// Sets the peaks of dtypes and of memory from the largest sizes of the sampled kernels.
void set_peaks(ComputeSpec& compute, const KernelTables& kernels, double factor);

}  // namespace tessera::tools
