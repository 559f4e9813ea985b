// What a published row ran: the model, its division among the ranks, and the framework's kernels.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/nn/models/config.h"
#include "tools/plan/device_profile.h"
#include "tools/plan/published_rows.h"

namespace tessera::tools {

/// The memory-bound kernels of a framework's block, loss and optimizer. Bytes are per token and element.
struct FrameworkStyle {
  const char* name;
  double width_forward, width_backward;    ///< bytes for each element of the hidden state
  double hidden_forward, hidden_backward;  ///< bytes for each element inside the feed-forward layer
  int kernels_forward, kernels_backward;   ///< of a block
  double loss_bytes;                       ///< for each logit
  double scores_forward, scores_backward;  ///< bytes for each score of unfused attention; 0: never unfused
};

/// Which activations a block recomputes.
enum class Recomputation : std::uint8_t { none, full, selective };

/// A row with everything filled in that it doesn't state; see docs/plan.md for the assumptions.
struct Workload {
  const DeviceProfile* device = nullptr;
  const FrameworkStyle* style = nullptr;
  nn::ModelConfig model;
  int ranks = 8, ranks_per_host = 8;
  std::int64_t sequences = 1, seq_len = 1;  ///< of a microbatch
  int microbatches = 1;
  std::string strategy;  ///< as the engine names it
  int shards = 1;        ///< ranks that share the parameters; 1: they are replicated
  bool prefetches = true, overlaps = true;
  bool reduces_f32 = false;
  AttentionKernel attention = AttentionKernel::flash2;
  std::vector<bool> recomputed;  ///< by block
  Recomputation recomputation = Recomputation::none;
  bool early_stop = true;   ///< recomputation ends before what no backward needs
  double feed_forward = 0;  ///< elements inside the feed-forward layer of the measured model
  double block_parameters = 0, root_parameters = 0;
  double engine_share = 1;                  ///< parameters of the measured model for each of the engine's
  double gather_copy = 0, reduce_copy = 0;  ///< bytes for each parameter of a unit
  double unit_host_s = 0, recomputed_host_s = 2e-4;
  double loss_bytes = 0;       ///< for each logit
  double optimizer_bytes = 0;  ///< for each local parameter
  int optimizer_launches = 0;
  double step_overhead_s = 0;
  double host_rate = 0;  ///< of a host's links to others, in bytes per second
  bool host_rate_stated = false;
  double launch_prior_s = 0;  ///< host time of a kernel launch before it is fitted

  std::int64_t tokens() const { return sequences * seq_len; }
  bool sharded() const { return shards > 1; }
};

/// Throws InvalidUsage that names the row for a model that the engine doesn't have.
Workload workload_of(const PublishedRow& row);

/// Floating-point operations of a step as the published figures count them: without the causal half, with
/// recomputation.
double counted_flops(const Workload& workload);

}  // namespace tessera::tools
