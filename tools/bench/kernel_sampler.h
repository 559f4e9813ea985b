// Times the kernels of training steps on this machine, and the steps themselves.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/nn/kernel_interceptor.h"
#include "tessera/plan/simulation.h"
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
  void merge(const KernelSampler& other);
  std::size_t calls() const;
  /// The sum over all calls.
  double sum_of_times() const;

 private:
  bool on_ = false;
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

}  // namespace tessera::tools
