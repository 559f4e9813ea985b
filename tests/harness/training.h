// Trains a small model under a strategy with ranks as threads, and returns all results that tests check.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/engine.h"
#include "tessera/fsdp/nn_model.h"
#include "tessera/nn/models/causal_model.h"
#include "tests/harness/guarded_device.h"

namespace tessera::harness {

struct TrainingSpec {
  nn::ModelConfig model = nn::preset("gpt-nano");
  int ranks = 2;
  std::string backend = "shm";
  int first_step = 0;  ///< first step with data; an earlier run did the steps before it
  int steps = 3;
  int global_batch = 12;
  int microbatches = 1;
  int seq_len = 16;
  int repeat_data = 0;  ///< repeats the data of this many steps; 0: each step has its own data
  int threads = 1;
  std::uint64_t seed = 0;
  double lr = 1e-2;
  base::DType dtype = base::DType::f32;  ///< of the model
  /// Modules with their own dtype, by path or "type:CLASS".
  std::vector<std::pair<std::string, base::DType>> module_dtypes = {};
  /// Creates models that `model` can't describe.
  std::function<std::unique_ptr<nn::CausalModel>(nn::Context& context)> make_model = {};
  /// Whether streams run work only when a caller waits for it. Default: true if the test needs no device of its own and
  /// inspects nothing before the last step.
  std::optional<bool> lazy_streams = {};
  /// Whether each step's work completes before the next step begins; default: unless streams are lazy. If false, only
  /// the first step's work does, losses are read after the last step, and only the last step's norms are recorded: a
  /// wait that a step omits changes the results of the next step.
  std::optional<bool> drains = {};
  std::shared_ptr<base::DeviceRuntime> runtime = {};  ///< null: the host; ranks share a device
  std::optional<bool> device_ipc = {};                ///< see comm::InitOptions
  fsdp::EngineOptions engine = {};
  bool retry_failed_steps = false;  ///< after Engine::abort_step(), where forward or backward throws on every rank
  comm::CommunicatorDecorator decorate = {};  ///< see comm::InitOptions
  /// Called on every rank once the engine has its initial values. `control` spans all ranks and is free for the test's
  /// use.
  std::function<void(fsdp::Engine& engine, comm::Communicator& control)> before_training;
  /// Called on every rank after each step's backward and after each step.
  std::function<void(int rank, int step, fsdp::Engine&engine, nn::CausalModel&model)> after_backward, after_step;
  /// Called on every rank after `after_step`, with the host collectives that exist as long as the training lasts.
  std::function<void(int step, fsdp::Engine& engine, comm::HostCollectives& control)> between_steps = {};

  bool lazy() const {
    return lazy_streams.value_or(runtime == nullptr && !before_training && !after_backward && !after_step &&
                                 !between_steps);
  }
};

/// Values of the slowest, the largest or the first rank.
struct TrainingRecord {
  std::vector<double> losses;                            // global means
  std::vector<double> norms;                             // where measured; see TrainingSpec::drains
  std::map<std::string, std::vector<float>> parameters;  // by name
  fsdp::EngineTraffic first_step, all_later;             // of rank 0
  std::vector<fsdp::EngineTraffic> later_by_rank;
  std::vector<base::TraceEvent> last_events;                   // rank 0, last step
  std::vector<base::MemoryTracker::Snapshot> memory_trackers;  // by rank, at the end
  std::vector<std::array<std::uint64_t, 3>> model_state;       // by rank: parameter, gradient, optimizer after backward
  std::vector<std::vector<HostWaits>>
      waits;                         // by rank and step: of the thread that trains, from the batch to the update
  std::uint64_t copied_bytes = 0;    // rank 0
  int failed_steps = 0;              // steps that rank 0 retried
  fsdp::OffloadBytes later_offload;  // rank 0, after the first step
  std::vector<fsdp::UnitStats> units;
  std::vector<fsdp::UnitSize> unit_sizes;
  fsdp::MeshShape mesh;
  fsdp::Strategy strategy;  // as applied to the mesh
};

TrainingRecord train(const TrainingSpec& spec);

/// Whether losses, norms (those that both have, from the last step back) and final parameters are bitwise equal; false
/// if there are none.
bool same_bits(const TrainingRecord& a, const TrainingRecord& b);

/// Calls or bytes of one step, averaged over `steps`.
fsdp::TrafficVolume calls_per_step(const fsdp::EngineTraffic& traffic, int steps);
fsdp::TrafficVolume bytes_per_step(const fsdp::EngineTraffic& traffic, int steps);

/// The engine's options for a named strategy; all other options have their defaults.
fsdp::EngineOptions engine_for(const std::string& strategy, const std::string& mesh = "");

/// A step's token batch, which is the same for every world size; a microbatch is a slice of the rank's slice of the
/// global batch.
struct TokenBatch {
  nn::Tensor tokens, targets;
};
TokenBatch make_batch(nn::Context& context, const TrainingSpec& spec, int step, int rank, int microbatch = 0);

/// A forward and backward of one batch; returns the loss. Gradients are those of `scale` times the loss.
nn::Tensor forward_backward(nn::CausalModel& model, const TokenBatch& batch, double scale = 1.0);

}  // namespace tessera::harness
