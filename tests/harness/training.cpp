#include "tests/harness/training.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <span>

#include "tessera/nn/host_access.h"

namespace tessera::harness {
namespace {

std::uint32_t mix(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

/// A sequence that can be learned: each token follows from its predecessor, with some noise.
std::int32_t token(const TrainingSpec& spec, int step, int sample, int position) {
  const auto key = static_cast<std::uint32_t>((step * spec.global_batch + sample) * 131 + position / 3);
  return static_cast<std::int32_t>(mix(key) % static_cast<std::uint32_t>(spec.model.vocabulary));
}

class Rank {
 public:
  Rank(const TrainingSpec& spec, comm::Communicator& world, TrainingRecord& record, std::mutex& mutex)
      : spec_(spec),
        world_(world),
        record_(record),
        mutex_(mutex),
        context_({.threads = spec.threads,
                  .memory_tracker = world.memory_tracker(),
                  .memory = {},
                  .make_stream = make_stream(spec),
                  .device = {},
                  .runtime = spec.runtime}),
        control_(world.split(0, world.rank())),
        exchange_(*control_, context_.runtime()),
        model_(spec.make_model ? spec.make_model(context_) : nn::make_model(context_, spec.model)),
        engine_(in_dtypes(*model_, spec), world, spec.engine) {
    engine_.initialize(spec.seed);
    if (spec.before_training) spec.before_training(engine_, *control_);
  }

  void run() {
    for (int step = spec_.first_step; step < spec_.steps; ++step) one_step(step);
    read_losses();
    record();
  }

 private:
  static nn::CausalModel& in_dtypes(nn::CausalModel& model, const TrainingSpec& spec) {
    model.set_dtype(spec.dtype);
    fsdp::NnModel adapted(model);
    for (const auto& [item, dtype] : spec.module_dtypes)
      for (fsdp::Module* module : fsdp::modules_named(adapted.root(), item, "module_dtypes"))
        fsdp::nn_module(*module).set_dtype(dtype);
    return model;
  }
  static std::function<std::unique_ptr<base::Stream>()> make_stream(const TrainingSpec& spec) {
    if (spec.lazy()) return base::make_lazy_stream;
    return {};
  }

  void one_step(int step) {
    const bool last = step + 1 == spec_.steps;
    engine_.trace().set_recording(drains_ || last);  // reading recorded events drains
    const HostWaits before = host_waits();
    std::vector<nn::Tensor> losses;
    try {
      losses = forward_backward(step);
    } catch (const base::Error&) {
      if (!spec_.retry_failed_steps) throw;
      ++failed_steps_;
      engine_.abort_step();
      losses = forward_backward(step);
    }
    if (spec_.after_backward) {
      context_.stream().synchronize();
      spec_.after_backward(world_.rank(), step, engine_, *model_);
    }
    record_state();
    engine_.step(spec_.lr);
    waits_.push_back(host_waits() - before);
    unread_.push_back(std::move(losses));
    if (drains_) read_losses();
    if ((drains_ || last) && engine_.options().measures_norm()) norms_.push_back(engine_.grad_norm());
    if (spec_.after_step) spec_.after_step(world_.rank(), step, engine_, *model_);
    if (spec_.between_steps) spec_.between_steps(step, engine_, exchange_);
    if (drains_ || last) events_ = engine_.trace().drain();
    if (step == spec_.first_step) {
      engine_.wait();
      context_.stream().synchronize();
      first_ = engine_.stats().traffic();
      first_offload_ = engine_.stats().offload_bytes();
    }
  }

  /// Reads the global means of the steps whose losses are unread.
  void read_losses() {
    if (unread_.empty()) return;
    std::vector<double> means;
    for (const std::vector<nn::Tensor>& losses : unread_) {
      double& mean = means.emplace_back(0);
      for (const nn::Tensor& loss : losses) mean += loss.item() / spec_.microbatches;
    }
    unread_.clear();
    const comm::View view = comm::view_of(means.data(), means.size());
    control_->all_reduce(view, view, comm::ReduceOp::avg()).wait();
    losses_.insert(losses_.end(), means.begin(), means.end());
  }

  std::vector<nn::Tensor> forward_backward(int step) {
    std::vector<nn::Tensor> losses;
    for (int microbatch = 0; microbatch < spec_.microbatches; ++microbatch)
      losses.push_back(forward_backward(step, microbatch));
    return losses;
  }

  nn::Tensor forward_backward(int step, int microbatch) {
    engine_.set_is_last_backward(microbatch + 1 == spec_.microbatches);
    const int of_data = spec_.repeat_data > 0 ? step % spec_.repeat_data : step;
    const TokenBatch batch = make_batch(context_, spec_, of_data, world_.rank(), microbatch);
    return harness::forward_backward(*model_, batch, 1.0 / spec_.microbatches);
  }

  void record_state() {
    const auto now = world_.memory_tracker()->snapshot();
    state_ = {now.now_of(base::MemoryCategory::parameter), now.now_of(base::MemoryCategory::gradient),
              now.now_of(base::MemoryCategory::optimizer)};
  }

  void record() {
    engine_.wait();
    context_.stream().synchronize();
    const fsdp::EngineTraffic later = engine_.stats().traffic() - first_;
    const base::MemoryTracker::Snapshot memory_tracker = world_.memory_tracker()->snapshot();
    const std::uint64_t copied = engine_.stats().copied_bytes();
    const fsdp::OffloadBytes offload = engine_.stats().offload_bytes();
    std::map<std::string, std::vector<float>> parameters;
    engine_.state().for_each_parameter([&](const fsdp::Parameter& p, std::span<const float> values) {
      parameters[p.name()].assign(values.begin(), values.end());
    });
    const std::lock_guard lock(mutex_);
    const auto rank = static_cast<std::size_t>(world_.rank());
    record_.later_by_rank[rank] = later;
    record_.memory_trackers[rank] = memory_tracker;
    record_.model_state[rank] = state_;
    record_.waits[rank] = waits_;
    if (rank != 0) return;
    record_.losses = losses_;
    record_.norms = norms_;
    record_.parameters = std::move(parameters);
    record_.first_step = first_;
    record_.all_later = later;
    record_.last_events = events_;
    record_.copied_bytes = copied;
    record_.failed_steps = failed_steps_;
    record_.later_offload = {offload.to_device - first_offload_.to_device, offload.to_host - first_offload_.to_host};
    record_.units = engine_.stats().units();
    record_.unit_sizes = engine_.stats().unit_sizes();
    record_.mesh = engine_.mesh().shape();
    record_.strategy = engine_.options().strategy;
  }

  const TrainingSpec& spec_;
  const bool drains_ = spec_.drains.value_or(!spec_.lazy());
  comm::Communicator& world_;
  TrainingRecord& record_;
  std::mutex& mutex_;
  nn::Context context_;
  std::unique_ptr<comm::Communicator> control_;
  comm::HostCollectives exchange_;
  std::unique_ptr<nn::CausalModel> model_;
  fsdp::Engine engine_;
  std::vector<std::vector<nn::Tensor>> unread_;  // losses of steps
  std::vector<double> losses_, norms_;
  std::vector<base::TraceEvent> events_;
  std::array<std::uint64_t, 3> state_{};
  std::vector<HostWaits> waits_;
  int failed_steps_ = 0;
  fsdp::EngineTraffic first_;
  fsdp::OffloadBytes first_offload_;
};

}  // namespace

TokenBatch make_batch(nn::Context& context, const TrainingSpec& spec, int step, int rank, int microbatch) {
  const int count = spec.global_batch / spec.ranks / spec.microbatches;
  const int first = (rank * spec.microbatches + microbatch) * count;
  const nn::Shape shape = {count, spec.seq_len};
  const auto ids = [&](int later) {
    nn::Tensor tensor = nn::Tensor::empty(context, shape, base::DType::i32);
    nn::upload(context, tensor.raw(), tensor.bytes(), [&](void* out) {
      for (int i = 0; i < count; ++i)
        for (int t = 0; t < spec.seq_len; ++t)
          static_cast<std::int32_t*>(out)[i * spec.seq_len + t] = token(spec, step, first + i, t + later);
    });
    return tensor;
  };
  return {ids(0), ids(1)};
}

nn::Tensor forward_backward(nn::CausalModel& model, const TokenBatch& batch, double scale) {
  nn::Tape tape;
  nn::Tensor loss;
  {
    const nn::TapeScope recording(model.context(), &tape);
    loss = model.loss(batch.tokens, batch.targets);
  }
  tape.backward(loss, scale);
  return loss;
}

fsdp::EngineOptions engine_for(const std::string& strategy, const std::string& mesh) {
  fsdp::EngineOptions options;
  options.strategy = fsdp::strategy_named(strategy);
  if (!mesh.empty()) options.mesh = fsdp::parse_mesh(mesh);
  return options;
}

TrainingRecord train(const TrainingSpec& spec) {
  TrainingRecord record;
  const auto ranks = static_cast<std::size_t>(spec.ranks);
  record.later_by_rank.resize(ranks);
  record.memory_trackers.resize(ranks);
  record.model_state.resize(ranks);
  record.waits.resize(ranks);
  std::mutex mutex;
  comm::InitOptions config;
  config.backend = spec.backend;
  config.algorithms = "all_reduce=direct,all_gather=direct,reduce_scatter=direct,broadcast=direct";
  config.timeout = std::chrono::seconds(60);
  config.device = spec.runtime;
  config.device_ipc = spec.device_ipc;
  config.decorate = spec.decorate;
  comm::run_threads(spec.ranks, config, [&](comm::Communicator& world) { Rank(spec, world, record, mutex).run(); });
  return record;
}

bool same_bits(const TrainingRecord& a, const TrainingRecord& b) {
  const auto same = [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
  };
  if (a.parameters.empty() || a.parameters.size() != b.parameters.size()) return false;
  if (!same(a.losses, b.losses) || a.norms.empty() != b.norms.empty()) return false;
  const std::size_t norms = std::min(a.norms.size(), b.norms.size());
  if (norms > 0 && !same(std::span(a.norms).last(norms), std::span(b.norms).last(norms))) return false;
  for (const auto& [name, values] : a.parameters) {
    const auto other = b.parameters.find(name);
    if (other == b.parameters.end() || !same(values, other->second)) return false;
  }
  return true;
}

namespace {

fsdp::TrafficVolume per_step(const fsdp::EngineTraffic& traffic, std::uint64_t comm::TrafficStats::TrafficCount::*field,
                             int steps) {
  const auto count = static_cast<std::uint64_t>(steps);
  return {traffic.all_gather.*field / count, traffic.reduce_scatter.*field / count, traffic.all_reduce.*field / count};
}

}  // namespace

fsdp::TrafficVolume calls_per_step(const fsdp::EngineTraffic& traffic, int steps) {
  return per_step(traffic, &comm::TrafficStats::TrafficCount::calls, steps);
}

fsdp::TrafficVolume bytes_per_step(const fsdp::EngineTraffic& traffic, int steps) {
  return per_step(traffic, &comm::TrafficStats::TrafficCount::bytes_sent, steps);
}

}  // namespace tessera::harness
