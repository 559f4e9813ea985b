// Measures this machine for `bench --cluster`: the kernels of training steps, the steps themselves, what a rank
// computes with, and the collectives of training.
#pragma once

#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/nn/kernel_interceptor.h"
#include "tessera/plan/simulation.h"
#include "tools/bench/runner.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// Times of one kernel and dtype.
struct KernelSamples {
  bool product = false;                           ///< its sizes are operations; else bytes
  std::map<double, std::vector<double>> seconds;  ///< by size

  /// The size and, in seconds, the mean or median of its samples.
  std::map<double, double> means() const;
  std::map<double, double> medians() const;
};

/// By name and dtype.
using KernelTables = std::map<std::pair<std::string, std::string>, KernelSamples>;

/// Measures each call while it is on: waits for the stream before and after it.
class KernelSampler final : public nn::KernelInterceptor {
 public:
  void call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) override;
  void turn(bool on) { on_ = on; }

  const KernelTables& kernels() const { return kernels_; }
  std::size_t calls() const { return calls_; }
  double sum_of_times() const { return sum_of_times_; }  ///< over all calls

 private:
  bool on_ = false;
  std::size_t calls_ = 0;
  double sum_of_times_ = 0;
  KernelTables kernels_;
};

/// A sample for each round, the mean of its calls. A training step consists of means: what regularly interrupts a call
/// belongs to them. A median over rounds has no disturbance that lasted for one of them.
KernelTables means_of_rounds(std::span<const KernelSampler> rounds);

/// The medians, multiplied by `factor`, as the cluster file has them.
std::vector<MeasuredKernel> measured_kernels(const KernelTables& kernels, double factor);

/// Trains `steps` steps on `world`, as train does, while all ranks of `control` do so too, after one or two others: the
/// first allocates everything, and the second matters where steps are short. Returns the slowest rank's seconds of each
/// step. `sampler`: null: the kernels are not timed, which makes steps faster.
std::vector<double> time_steps(const plan::TrainingStep& step, comm::Communicator& world,
                               comm::HostCollectives& control, int steps, KernelSampler* sampler);

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

/// By operation, one table for each number of ranks.
using CollectiveTables = std::map<std::string, std::vector<MeasuredCollective>>;

/// The sizes of communicators that a mesh of `ranks` may have: the divisors from 2.
std::vector<int> group_sizes(int ranks);

/// Collective: measures each operation of `spec` at its sizes on groups of every such number of ranks, all groups at
/// once as in training; rank 0's result counts. `say` is called with a line before each operation.
CollectiveTables measure_collectives(const BenchSpec& spec, comm::Communicator& world,
                                     const std::function<void(const std::string&)>& say);

/// Collective: the memory of communicators of 1 rank and of those of group_sizes() on this rank. `world` has a memory
/// tracker.
std::vector<MeasuredCommunicator> measure_communicators(comm::Communicator& world);

/// The link of one rank that explains the tables of all_gather among all ranks. Throws InvalidUsage for tables without
/// three sizes.
LinkSpec fit_link(const CollectiveTables& tables, int ranks);

/// A training of a model, as measured and as simulated.
struct StepSample {
  std::string strategy;
  double measured_ms = 0;
  double simulated_ms = 0;
  double late_ms = 0;  ///< exposed communication, measured less simulated
};

/// What a step costs besides its kernels and collectives, from the samples of several models, each with several
/// strategies. "others" have the ratios of the median strategy.
StepOverhead fit_step_overhead(const std::vector<std::vector<StepSample>>& models);

}  // namespace tessera::tools
