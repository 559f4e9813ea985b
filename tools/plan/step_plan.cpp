#include "tools/plan/step_plan.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/traffic.h"
#include "tessera/plan/cost_table.h"
#include "tools/train/measurements.h"
#include "tools/train/model_task.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

/// The mean of the losses over the ranks, which a training loop asks for in every step.
void add_loss(RunResult& run, int ranks) {
  if (ranks == 1) return;
  run.calls_per_step.control += 1;
  run.wire_bytes_per_step.control += comm::direct_bytes_sent(comm::OpKind::all_reduce, 1, sizeof(double), ranks, 0);
}

void fill(RunResult& run, const plan::StepProfile& profile, const TrainPlan& plan, const fsdp::EngineOptions& engine) {
  const auto steps = static_cast<double>(profile.steps.size());
  double step_ns = 0, exposed_ns = 0;
  for (const plan::StepTimes& step : profile.steps) {
    step_ns += static_cast<double>(step.step_ns) / steps;
    exposed_ns += static_cast<double>(step.exposed_ns) / steps;
    run.step_ms_p95 = std::max(run.step_ms_p95, static_cast<double>(step.step_ns) / 1e6);
  }
  run.strategy = engine.strategy.name;
  const int replicas = profile.mesh.size_of(fsdp::kReplicateAxis);
  run.mesh = {replicas, profile.mesh.size() / replicas};
  run.units = profile.units;
  run.step_ms_median = step_ns / 1e6;
  run.exposed_communication_ms = exposed_ns / 1e6;
  if (step_ns > 0)
    run.tokens_per_second = static_cast<double>(plan.options.global_batch * plan.seq_len) / step_ns * 1e9;
  run.calls_per_step = calls_of(profile.traffic, profile.steps.size());
  run.wire_bytes_per_step = bytes_of(profile.traffic, profile.steps.size());
  run.copied_bytes_per_step = profile.copied_bytes / profile.steps.size();
  add_loss(run, plan.ranks);
  run.model_state_bytes = {profile.model_state.parameter, profile.model_state.gradient, profile.model_state.optimizer};
  run.peak_bytes = profile.memory;
}

/// Milliseconds from the begin of the first simulated step to the end of the last one, divided by the steps.
std::vector<double> simulate_ranks(const plan::StepProfile& profile, const plan::VirtualClock& clock,
                                   const comm::Communicator& world, const SimulatedCluster& cluster, int ranks,
                                   const plan::Variation& variation) {
  if (cluster.measured)
    throw base::InvalidUsage("cluster " + cluster.spec.name +
                             ": its operations have measured times, which are those of equal ranks; leave out "
                             "--slow-rank, --slow-link and --jitter, or \"measured\"");
  const std::array marks{profile.steps.front().begin_task, profile.steps.back().end_task};
  const auto times =
      plan::simulate_all_ranks(clock.graph(), plan::transfers_of(world), cluster.topology, ranks, variation, marks);
  std::vector<double> steps;
  for (const auto& rank : times)
    steps.push_back(static_cast<double>(rank[1] - rank[0]) / 1e6 / static_cast<double>(profile.steps.size()));
  return steps;
}

void vary(StepPlan& planned, const TrainPlan& plan, const plan::Variation& variation,
          std::vector<double> rank_step_ms) {
  planned.rank_step_ms = std::move(rank_step_ms);
  RunResult& run = planned.result;
  // What a rank does not compute it waits, for links and for slower ranks: as measured, that of the rank that waits
  // most. The mean of the absolute value of a normal distribution of deviation 1 is sqrt(2 / pi).
  const double compute_ms =
      (run.step_ms_median - run.exposed_communication_ms) * (1 + variation.jitter * std::sqrt(2 / std::numbers::pi));
  run.exposed_communication_ms = 0;
  for (std::size_t rank = 0; rank < planned.rank_step_ms.size(); ++rank) {
    const auto slow = variation.slow_ranks.find(static_cast<int>(rank));
    const double factor = slow == variation.slow_ranks.end() ? 1 : slow->second;
    run.exposed_communication_ms =
        std::max(run.exposed_communication_ms, planned.rank_step_ms[rank] - factor * compute_ms);
  }
  run.step_ms_median = *std::ranges::max_element(planned.rank_step_ms);
  run.step_ms_p95 = run.step_ms_median;
  run.tokens_per_second = static_cast<double>(plan.options.global_batch * plan.seq_len) / run.step_ms_median * 1e3;
}

/// Corrects the times of the simulation as measured steps differ from simulated ones.
void add_overhead(RunResult& run, const StepOverhead& overhead) {
  auto points = overhead.steps.find(run.strategy);
  if (points == overhead.steps.end()) points = overhead.steps.find("others");
  if (points == overhead.steps.end()) return;
  plan::CostTable measured;
  for (const auto& [simulated_ms, ms] : points->second) measured.add(simulated_ms, ms);
  const double before = run.step_ms_median;
  const double exposed = run.exposed_communication_ms;  // a link is as fast as it is simulated
  for (double* const time : {&run.step_ms_median, &run.step_ms_p95}) *time = measured.at(*time - exposed) + exposed;
  run.exposed_communication_ms += overhead.late * run.step_ms_median;
  if (run.step_ms_median > 0) run.tokens_per_second *= before / run.step_ms_median;
}

/// Fills what is about the last step of `profile`.
void add_last_step(StepPlan& planned, const plan::StepProfile& profile, const plan::VirtualClock& clock,
                   const comm::Communicator& world, const plan::KernelSimulator& kernels, StepDetails details) {
  const plan::StepTimes& step = profile.steps.back();
  planned.events = step.events;
  planned.begin_ns = step.begin_ns;
  planned.end_ns = step.begin_ns + step.step_ns;
  planned.step_memory = step.memory;
  const std::vector<plan::TransferRecord> transfers = plan::transfers_of(world);
  for (const plan::TransferRecord& transfer : transfers) {
    if (transfer.task >= step.first_issued)
      planned.transfers.push_back(transfer);
    else if (transfer.done_ns > step.begin_ns)
      planned.in_flight.push_back(transfer);
  }
  if (!details.graph) return;
  const plan::StepTimes& first = details.isolated ? step : profile.steps[profile.steps.size() - 2];
  planned.graph_begin_ns = first.begin_ns;
  planned.graph = plan::step_graph(clock, {first.begin_task, first.first_issued, step.issued_end}, transfers, kernels);
  const auto in_step = [&](const plan::StepNode& node) { return node.task >= step.first_issued; };
  planned.first_node = static_cast<std::uint32_t>(std::ranges::find_if(planned.graph, in_step) - planned.graph.begin());
}

/// The axis along which these ranks are, "world" if it is none. Ranks count along the innermost axis first.
std::string axis_of(const plan::RankSet& members, const fsdp::MeshShape& mesh) {
  int stride = 1;
  for (auto axis = mesh.axes.rbegin(); axis != mesh.axes.rend(); stride *= axis->size, ++axis)
    if (axis->size == members.ranks && stride == members.stride) return axis->name;
  return "world";
}

}  // namespace

plan::TrainingStep training_step(const TrainPlan& plan, const fsdp::EngineOptions& engine) {
  return {.make_task = [&plan](nn::Context& context) { return make_task(plan, context); },
          .samples = plan.options.global_batch / plan.ranks / plan.options.accumulate,
          .microbatches = static_cast<int>(plan.options.accumulate),
          .threads = 1,
          .products = plan.products,
          .engine = engine};
}

StepPlan plan_step(const TrainPlan& plan, const std::string& strategy, const SimulatedCluster& cluster,
                   const std::optional<plan::Variation>& variation, StepDetails details) {
  const fsdp::EngineOptions engine = engine_options(plan, strategy);
  plan::TrainingStep step = training_step(plan, engine);
  step.memory_history = details.step_memory;
  step.continuous = !details.isolated;
  plan::VirtualClock clock(cluster.streams);
  const auto world = plan::make_world(plan.ranks, clock, cluster.network);
  if (details.all_memory) world->memory_tracker()->keep_history(true);
  // The trainer computes mean losses on the world, in ordinary memory.
  const base::TrackedBytes loss_bytes(*world->memory_tracker(), base::MemoryCategory::communication,
                                      cluster.loss_bytes);
  const int steps = sync_period(engine.strategy) + (details.graph && !details.isolated ? 1 : 0);
  plan::KernelSimulator kernels(clock, cluster.kernels);
  const plan::StepProfile profile = plan::predict_step(step, *world, clock, kernels, steps);
  StepPlan planned;
  fill(planned.result, profile, plan, engine);
  if (variation)
    vary(planned, plan, *variation, simulate_ranks(profile, clock, *world, cluster, plan.ranks, *variation));
  add_overhead(planned.result, cluster.spec.compute.overhead);
  const std::map<std::string, double>& peaks = cluster.spec.compute.peak_flops;
  const auto peak = peaks.find(product_dtype_of(plan));
  if (peak != peaks.end() && !plan.task)
    planned.mfu = model_flops_utilization(plan, planned.result.tokens_per_second, peak->second * plan.ranks);
  planned.mesh = profile.mesh;
  planned.unit_sizes = profile.unit_sizes;
  if (details.all_memory) planned.memory = world->memory_tracker()->drain_history();
  add_last_step(planned, profile, clock, *world, kernels, details);
  return planned;
}

std::vector<base::TransferEvent> transfer_events(const StepPlan& plan) {
  const int rank = plan.mesh.size() - 1;  // the simulated one
  std::vector<base::TransferEvent> transfers;
  for (const plan::TransferRecord& transfer : plan.transfers)
    transfers.push_back({.operation = std::string(name_of(transfer.operation.kind)),
                         .axis = axis_of(transfer.operation.members, plan.mesh),
                         .rank = rank,
                         .bytes = transfer.operation.bytes_sent,
                         .called_ns = transfer.called_ns,
                         .begun_ns = transfer.begun_ns,
                         .done_ns = transfer.done_ns});
  return transfers;
}

}  // namespace tessera::tools
