// Times the kernels of training steps on this machine, and the steps themselves.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/engine_options.h"
#include "tessera/nn/kernel_interceptor.h"
#include "tessera/nn/models/causal_model.h"
#include "tools/plan/cluster_file.h"

namespace tessera::tools {

/// Times of one kernel and dtype.
struct KernelSamples {
  bool product = false;                              ///< its sizes are operations; else bytes
  std::map<double, std::vector<double>> seconds;     ///< by size
  std::map<double, double> times(bool means) const;  ///< by size: medians or means
};

/// Measures each call while it is on: waits for the stream before and after it.
class KernelSampler final : public nn::KernelInterceptor {
 public:
  /// `means`: for ranks that share cores, where a call sometimes includes another rank's turn. A median has none of
  /// these turns in short calls, and all of them in long ones.
  explicit KernelSampler(bool means) : means_(means) {}
  void call(const nn::KernelInvocation& call, base::Stream& stream, const std::function<void()>& run) override;
  void turn(bool on) { on_ = on; }
  bool means() const { return means_; }

  /// By name and dtype.
  const std::map<std::pair<std::string, std::string>, KernelSamples>& kernels() const { return kernels_; }
  void merge(const KernelSampler& other);
  std::size_t calls() const;
  /// By size, the median or mean.
  std::map<double, double> times(const KernelSamples& samples) const { return samples.times(means_); }
  /// The sum of these over all calls.
  double sum_of_times() const;
  /// As the cluster file has them, multiplied by `factor`.
  std::vector<MeasuredKernel> tables(double factor) const;

 private:
  const bool means_;
  bool on_ = false;
  std::map<std::pair<std::string, std::string>, KernelSamples> kernels_;
};

/// A training step whose kernels are measured.
struct SampledStep {
  nn::ModelConfig model;
  base::DType dtype = base::DType::f32;
  /// Empty: `model` in `dtype`.
  std::function<std::unique_ptr<nn::CausalModel>(nn::Context& context)> make_model;
  std::int64_t sequences = 1;
  std::int64_t seq_len = 1;
  int microbatches = 1;
  int threads = 1;
  fsdp::EngineOptions engine;
};

inline constexpr int kWarmupSteps = 2;

/// Trains `steps` steps after kWarmupSteps on `world`, as train does, while all ranks of `control` do so too. Returns
/// the slowest rank's seconds of each step. `sampler`: null: the kernels are not timed, which makes steps faster.
std::vector<double> time_steps(const SampledStep& step, comm::Communicator& world, comm::HostCollectives& control,
                               int steps, KernelSampler* sampler);

}  // namespace tessera::tools
