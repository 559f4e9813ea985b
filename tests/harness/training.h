// Trains a small model under a strategy with ranks as threads, and returns everything that tests ask about.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/host_collectives.h"
#include "tessera/comm/init.h"
#include "tessera/fsdp/engine.h"
#include "tessera/nn/models/causal_model.h"
#include "tests/harness/guarded_device.h"

namespace tessera::harness {

struct TrainingSpec {
  nn::ModelConfig model = nn::preset("gpt-nano");
  int ranks = 2;
  std::string backend = "shm";
  int first_step = 0;  ///< where data begins; steps before it were another run's
  int steps = 3;
  int global_batch = 12;
  int microbatches = 1;
  int seq_len = 16;
  int repeat_data = 0;  ///< the data of so many steps over and over; 0: each step has its own
  int threads = 1;
  std::uint64_t seed = 0;
  double lr = 1e-2;
  base::DType dtype = base::DType::f32;  ///< of the model
  /// Modules with one of their own, by path or "type:CLASS".
  std::vector<std::pair<std::string, base::DType>> module_dtypes = {};
  /// Makes the model where `model` alone doesn't say enough.
  std::function<std::unique_ptr<nn::CausalModel>(nn::Context& context)> make_model = {};
  /// Whether what is given to a stream runs only when somebody waits for it. Nothing: where the test needs no device of
  /// its own, and looks at nothing before the last step.
  std::optional<bool> lazy_streams = {};
  /// Whether each step's work has run before the next step begins; nothing: unless streams are lazy. Else only the
  /// first step's has, losses are read after the last step, and norms are the last step's only: what a step forgets to
  /// wait for shows in the next one.
  std::optional<bool> drains = {};
  std::shared_ptr<base::DeviceRuntime> runtime = {};  ///< null: the host; ranks share a device
  std::optional<bool> device_ipc = {};                ///< as comm::InitOptions's
  fsdp::EngineOptions engine = {};
  bool retry_failed_steps = false;  ///< after Engine::abort_step(), where forward or backward throws on every rank
  std::string decorators = {};      ///< around every rank's communicators; see plugins/decorators/spec.h
  /// Called on every rank when the engine has its initial values. `control` is of all ranks, for whatever the test
  /// wants.
  std::function<void(fsdp::Engine& engine, comm::Communicator& control)> before_training;
  /// Called on every rank after each step's backward and after each step.
  std::function<void(int rank, int step, fsdp::Engine&engine, nn::CausalModel&model)> after_backward, after_step;
  /// Called on every rank after `after_step`, with what ranks tell each other over as long as the training lasts.
  std::function<void(int step, fsdp::Engine& engine, comm::HostCollectives& control)> between_steps = {};

  bool lazy() const {
    return lazy_streams.value_or(runtime == nullptr && !before_training && !after_backward && !after_step &&
                                 !between_steps);
  }
};

/// What the slowest, largest or first rank saw.
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
  int failed_steps = 0;              // that rank 0 tried again
  fsdp::OffloadBytes later_offload;  // rank 0, after the first step
  std::vector<fsdp::Engine::UnitStats> units;
  std::vector<fsdp::UnitSize> unit_sizes;
  fsdp::MeshShape mesh;
  fsdp::Strategy strategy;  // as it is laid over the mesh
};

TrainingRecord train(const TrainingSpec& spec);

/// Losses, norms (those that both have, from the last step back) and final parameters; false where there are none.
bool same_bits(const TrainingRecord& a, const TrainingRecord& b);

/// What one step called or sent, on average over `steps`.
fsdp::TrafficVolume calls_per_step(const fsdp::EngineTraffic& traffic, int steps);
fsdp::TrafficVolume bytes_per_step(const fsdp::EngineTraffic& traffic, int steps);

/// The engine's options for a strategy by name; everything else default.
fsdp::EngineOptions engine_for(const std::string& strategy, const std::string& mesh = "");

/// Token batch of a step: the same for every world size; a microbatch's slice of the rank's slice of the global batch.
struct TokenBatch {
  nn::Tensor tokens, targets;
};
TokenBatch make_batch(nn::Context& context, const TrainingSpec& spec, int step, int rank, int microbatch = 0);

}  // namespace tessera::harness
