#include "tools/plan/recorded_step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <string>
#include <utility>

#include "tessera/fsdp/simulation.h"
#include "tessera/nn/activation_checkpoint.h"

namespace tessera::tools {
namespace {

namespace sim = comm::sim;

constexpr double kLaunchBlocks = 16;       // multiprocessors that a running collective occupies
constexpr double kOperationStart = 20e-6;  // seconds from the call of a collective to its first byte
constexpr double kSlowestHost = 0.012;     // spread of the hosts' step times: all wait for the slowest
constexpr int kRecorded = 3;               // microbatches: the first, one between and the last

int hosts_of(const Workload& workload) {
  return (workload.ranks + workload.ranks_per_host - 1) / workload.ranks_per_host;
}

/// The host runs ahead in the forward, so that each block's gather overlaps the block before it.
std::map<std::string, std::vector<std::string>> next_blocks(const Workload& workload) {
  const std::string prefix = workload.model.family == nn::ModelConfig::Family::gpt2 ? "h." : "model.layers.";
  std::map<std::string, std::vector<std::string>> next;
  for (std::int64_t i = 0; i + 1 < workload.model.layers; ++i)
    next[prefix + std::to_string(i)] = {prefix + std::to_string(i + 1)};
  return next;
}

fsdp::EngineOptions engine_options_of(const Workload& workload) {
  fsdp::EngineOptions engine;
  engine.strategy = fsdp::strategy_named(workload.strategy);
  const fsdp::Accumulation when = workload.strategy == "hsdp" ? fsdp::Accumulation::scatter
                                  : workload.sharded()        ? fsdp::Accumulation::every
                                                              : fsdp::Accumulation::last;
  engine.strategy = fsdp::with_accumulation(std::move(engine.strategy), when);
  engine.mesh = workload.strategy == "hsdp"
                    ? fsdp::MeshShape::grid(workload.ranks / workload.shards, workload.shards)
                    : fsdp::default_mesh(engine.strategy, workload.ranks, workload.ranks_per_host);
  engine.wrap = workload.overlaps || workload.sharded() ? "block" : "none";
  engine.prefetch = workload.prefetches ? 1 : 0;
  if (!workload.prefetches) engine.prefetch_order.forward = next_blocks(workload);
  if (workload.reduces_f32 && workload.sharded()) engine.reduce_dtype = base::DType::f32;
  engine.clip_norm = 1;
  return engine;
}

std::unique_ptr<nn::CausalModel> model_of(nn::Context& context, const Workload& workload) {
  auto model = nn::make_model(context, workload.model);
  model->set_dtype(base::DType::bf16);
  if (workload.recomputation == Recomputation::none) return model;
  std::size_t block = 0;
  std::vector<const nn::Module*> chosen;
  for (const nn::Module* module : model->modules())
    if (module->is_block() && workload.recomputed.at(block++)) chosen.push_back(module);
  nn::checkpoint_activations(*model, [&chosen](const nn::Module& module) {
    return std::find(chosen.begin(), chosen.end(), &module) != chosen.end();
  });
  return model;
}

}  // namespace

sim::Topology topology_of(const Workload& workload, double link) {
  constexpr double kPort = 3.4e-6, kHost = 14e-6;  // latency of a message inside a host and between hosts
  constexpr double kHostsShare = 0.95;             // of the rate inside a host, where a ring leaves it
  const int peers = std::min(workload.ranks_per_host, workload.shards > 1 ? workload.shards : workload.ranks);
  const bool leaves =
      std::max(workload.shards, workload.strategy == "hsdp" ? 1 : workload.ranks) > workload.ranks_per_host;
  sim::Topology topology;
  topology.bytes_per_second =
      workload.device->link_rate * (0.85 + 0.15 * std::min(1.0, (peers - 2) / 6.0)) * (leaves ? kHostsShare : 1);
  topology.latency_s = kPort;
  topology.sharing = sim::LinkSharing::in_order;
  topology.algorithms = {"all_gather=vendor,reduce_scatter=vendor,all_reduce=vendor", sim::simulated_algorithms()};
  if (hosts_of(workload) > 1)
    topology.domains.push_back(
        {.ranks = workload.ranks_per_host, .bytes_per_second = workload.host_rate * link, .latency_s = kHost});
  return topology;
}

double operation_time(const sim::Network& network, const sim::SimulatedOp& operation) {
  const auto alone = static_cast<double>(sim::time_alone(network, network.cost(operation)).count()) / 1e9;
  return kOperationStart + alone;
}

RecordedStep::RecordedStep(Workload workload) : workload_(std::move(workload)) { record(); }

void RecordedStep::record() {
  recorded_microbatches_ = std::min(workload_.microbatches, kRecorded);
  const fsdp::TrainingStep step{.make_model = [this](nn::Context& context) { return model_of(context, workload_); },
                                .sequences = workload_.sequences,
                                .seq_len = workload_.seq_len,
                                .microbatches = recorded_microbatches_,
                                .threads = 1,
                                .engine = engine_options_of(workload_)};
  base::VirtualClock clock(base::VirtualClock::Machine::asynchronous);
  const auto world = sim::make_world(workload_.ranks, clock, sim::cluster(topology_of(workload_, 1), workload_.ranks));
  FrameworkProfile profile(workload_, clock);
  const fsdp::StepProfile predicted = fsdp::predict_step(step, *world, clock, profile);
  peak_bytes_ = static_cast<std::uint64_t>(predicted.memory.total_peak);
  std::map<base::TaskId, std::int32_t> operations;
  for (const sim::TransferRecord& transfer : sim::transfers_of(*world))
    operations[transfer.task] = number_of(transfer.operation);
  keep(clock.graph(), predicted.steps.back().begin_task, predicted.steps.back().end_task, profile, operations);
}

std::int32_t RecordedStep::number_of(const sim::SimulatedOp& operation) {
  for (std::size_t i = 0; i < operations_.size(); ++i)
    if (operations_[i].kind == operation.kind && operations_[i].bytes == operation.bytes &&
        operations_[i].members == operation.members)
      return static_cast<std::int32_t>(i);
  operations_.push_back(operation);
  return static_cast<std::int32_t>(operations_.size() - 1);
}

void RecordedStep::keep(const base::TaskGraph& graph, base::TaskId begin, base::TaskId end,
                        const FrameworkProfile& profile, const std::map<base::TaskId, std::int32_t>& operations) {
  for (base::TaskId id = begin + 1; id <= end; ++id) {
    const base::TaskGraph::Task& from = graph.tasks()[id];
    Task task{.first_dependency = static_cast<std::uint32_t>(dependencies_.size()), .dependencies = from.dependencies};
    for (const base::TaskId earlier : graph.dependencies(from))
      dependencies_.push_back(earlier > begin ? earlier - begin : 0);
    const auto work = profile.work().find(id);
    if (work != profile.work().end()) {
      task.work = static_cast<std::int32_t>(work_.size());
      work_.push_back(work->second);
    }
    const auto operation = operations.find(id);
    if (operation != operations.end()) task.operation = operation->second;
    const auto& begins = profile.microbatches();
    task.begins_microbatch = std::binary_search(begins.begin(), begins.end(), id);
    tasks_.push_back(task);
  }
}

/// One pass over the tasks in the order of their issue.
class RecordedStep::Timing {
 public:
  Timing(const RecordedStep& step, const MachineParameters& parameters)
      : step_(step), parameters_(parameters), ends_(step.tasks_.size() + 1, 0) {
    const sim::Network network = sim::cluster(topology_of(step.workload_, parameters.link), step.workload_.ranks);
    for (const sim::SimulatedOp& operation : step.operations_) {
      sim::SimulatedOp scaled = operation;
      scaled.bytes = static_cast<std::uint64_t>(static_cast<double>(scaled.bytes) * step.workload_.engine_share);
      operation_s_.push_back(operation_time(network, scaled));
    }
  }

  double seconds() {
    for (std::size_t i = 0; i < step_.tasks_.size(); ++i) ends_[i + 1] = run(step_.tasks_[i]);
    const double last = std::max(host_, *std::max_element(ends_.begin(), ends_.end()));
    const int more = step_.workload_.microbatches - step_.recorded_microbatches_;
    const std::size_t marks = microbatches_.size();
    return more > 0 && marks > 1 ? last + more * (microbatches_[marks - 1] - microbatches_[marks - 2]) : last;
  }

 private:
  using Interval = std::pair<double, double>;

  double run(const Task& task) {
    double ready = 0;
    for (std::uint32_t i = 0; i < task.dependencies; ++i)
      ready = std::max(ready, ends_[step_.dependencies_[task.first_dependency + i]]);
    if (task.begins_microbatch) microbatches_.push_back(std::max(device_, host_));
    if (task.operation >= 0) return transfer(task.operation, ready);
    if (task.work >= 0) return compute(step_.work_[static_cast<std::size_t>(task.work)], ready);
    return ready;
  }

  /// The library has one queue for each set of ranks, whichever communicator the engine uses.
  double transfer(std::int32_t operation, double ready) {
    double& queue = queues_[step_.operations_[static_cast<std::size_t>(operation)].members.stride > 1 ? 1 : 0];
    const double begin = std::max({queue, ready, host_});
    queue = begin + operation_s_[static_cast<std::size_t>(operation)];
    transfers_.insert(std::upper_bound(transfers_.begin(), transfers_.end(), Interval{begin, queue}), {begin, queue});
    return queue;
  }

  /// The host launches ahead of the device. Transfers in flight take multiprocessors away.
  double compute(const KernelWork& work, double ready) {
    const double begin = std::max({device_, host_ + parameters_.launch_s, ready});
    host_ += work.launches * parameters_.launch_s + work.host;
    const double alone = work.products / parameters_.products + work.memory / parameters_.memory + work.gaps;
    device_ = std::max(stretched(begin, alone), host_ + parameters_.launch_s);
    constexpr std::size_t kKept = 24;
    if (transfers_.size() > kKept)
      std::erase_if(transfers_, [this](const Interval& transfer) { return transfer.second <= device_; });
    return device_;
  }

  double stretched(double now, double left) const {
    const double slow = 1 - kLaunchBlocks / step_.workload_.device->multiprocessors;
    for (const auto& [begin, end] : transfers_) {
      if (end <= now) continue;
      if (begin >= now + left) break;
      if (begin > now) {
        left -= begin - now;
        now = begin;
      }
      if (left <= (end - now) * slow) return now + left / slow;
      left -= (end - now) * slow;
      now = end;
    }
    return now + left;
  }

  const RecordedStep& step_;
  const MachineParameters& parameters_;
  std::vector<double> ends_, operation_s_, microbatches_;
  std::array<double, 2> queues_{};
  std::vector<Interval> transfers_;
  double device_ = 0, host_ = 0;
};

double RecordedStep::seconds(const MachineParameters& parameters) const {
  const int hosts = hosts_of(workload_);
  const double slowest = hosts > 1 ? 1 + kSlowestHost * std::sqrt(2 * std::log(hosts)) : 1;
  return Timing(*this, parameters).seconds() * slowest + workload_.step_overhead_s * parameters.overhead;
}

}  // namespace tessera::tools
