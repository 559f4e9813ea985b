#include "tools/train/trainer.h"

#include <algorithm>
#include <numeric>

#include "tessera/comm/flight_recorder.h"
#include "tessera/comm/host_collectives.h"
#include "tessera/fsdp/gradient_scaler.h"
#include "tessera/fsdp/graphed_step.h"
#include "tools/cli/machine.h"
#include "tools/cli/output.h"
#include "tools/results/statistics.h"
#include "tools/train/measurements.h"
#include "tools/train/model_files.h"
#include "tools/train/model_task.h"
#include "tools/train/run_checkpointer.h"
#include "tools/train/step_progress.h"
#include "tools/train/step_recorder.h"

namespace tessera::tools {
namespace {

using base::MemoryCategory;
using base::TraceEvent;

/// The first two steps warm up caches and pools; with fewer than three steps all count.
template <class T>
std::vector<T> without_warm_up(const std::vector<T>& values) {
  return values.size() > 2 ? std::vector<T>(values.begin() + 2, values.end()) : values;
}

/// Of all ranks.
StepParts mean_over(comm::HostCollectives& control, const std::vector<StepParts>& steps) {
  const StepParts own = mean_of(without_warm_up(steps));
  std::vector<StepParts> ranks;
  for (const auto& rank : control.gather_all(each_of(kStepParts, [&](const auto& part) { return own.*part.second; }))) {
    StepParts& parts = ranks.emplace_back();
    for (std::size_t i = 0; i < rank.size(); ++i) parts.*kStepParts[i].second = rank[i];
  }
  return mean_of(ranks);
}

/// The means over whole sync periods, of which one step differs from the others; over all steps if they are fewer.
std::vector<double> by_period(const std::vector<double>& steps, int period) {
  const auto block = std::min(static_cast<std::ptrdiff_t>(steps.size()), static_cast<std::ptrdiff_t>(period));
  std::vector<double> means;
  for (auto from = steps.begin(); block > 0 && steps.end() - from >= block; from += block)
    means.push_back(std::accumulate(from, from + block, 0.0) / static_cast<double>(block));
  return means;
}

struct Counters {
  fsdp::EngineTraffic engine;
  comm::TrafficStats world;  ///< of losses, and of what is said of the run
  std::uint64_t copied_bytes = 0;
};

/// The traffic before a training whose settings are alike on all ranks, which it compares.
auto traffic_of_alike(comm::HostCollectives& control, const TrainPlan& plan) {
  if (control.size() > 1) comm::require_alike(control, shared_settings_of(plan), "training");
  return control.communicator().traffic();
}

class Trainer {
 public:
  Trainer(const TrainPlan& plan, const std::string& strategy, comm::Communicator& world,
          const std::shared_ptr<base::MemoryTracker>& memory_tracker, bool measure_norm)
      : plan_(plan),
        world_(world),
        memory_tracker_(*memory_tracker),
        context_({.threads = plan.threads,
                  .memory_tracker = memory_tracker,
                  .device = device_of_rank(plan.options.device),
                  .logger = world.logger(),
                  .products = plan.products}),
        control_(world, context_.runtime()),
        first_{.world = traffic_of_alike(control_, plan)},
        slow_world_(slow_copy(world, plan.links)),
        divergence_(control_, plan.options.wrap == "block" ? strategy : strategy + " " + plan.options.wrap),
        task_(plan.task ? make_task(plan, context_) : std::make_unique<LanguageTask>(plan, context_)),
        engine_(task_->model(), slow_world_ ? *slow_world_ : world, options_for(plan, strategy, measure_norm)),
        peak_flops_(peak_flops_of(plan)) {
    if (!plan.options.report.empty()) recorder_.emplace(memory_tracker_);
    if (plan.graphs != GraphUse::never) {
      graphed_.emplace(engine_,
                       plan.graphs == GraphUse::required ? fsdp::Uncapturable::error : fsdp::Uncapturable::runs_step);
      dynamic_cast<LanguageTask&>(*task_).replay_with(*graphed_);  // graph_use_of() refuses others
    }
    if (plan.precision.compute == base::DType::f16) scaler_.emplace(engine_);
    load_values(plan, engine_, scaler_ ? &*scaler_ : nullptr);
    if (!plan.options.save.empty()) saving_.emplace(plan, engine_, control_, scaler_ ? &*scaler_ : nullptr);
  }

  void train(const TrainingCallbacks& callbacks) {
    if (callbacks.on_ready) callbacks.on_ready(engine_);
    for (std::int64_t step = plan_.first_step; step < plan_.options.steps; ++step) {
      const StepReport report = train_step(step, callbacks);
      if (world_.rank() == 0 && callbacks.on_step) callbacks.on_step(report);
      note_counters(step + 1 - plan_.first_step);
      if (saving_) saving_->after_step(step + 1);
    }
    engine_.wait();
    if (saving_) saving_->finish();
  }

  TrainingOutcome finish() {
    TrainingOutcome outcome;
    outcome.result = summarize();
    if (recorder_) {
      outcome.result.timeline = recorder_->gather(control_);
      add_state(*outcome.result.timeline, plan_, engine_.options().strategy, engine_.mesh().shape());
    }
    recorder_.reset();        // what follows is in no picture
    engine_.sync_replicas();  // with a sync period: makes all replicas equal for what follows
    outcome.result.final_parameters_hash = hash_parameters(engine_);
    if (!plan_.options.trace.empty()) outcome.last_step = gather_events(control_, last_events_);
    if (!plan_.options.eval.empty()) outcome.result.evaluation = evaluate(plan_, *task_, control_);
    if (const auto& found = outcome.result.evaluation) divergence_.after_evaluation(found->loss);
    export_directories(plan_, engine_, world_.rank());
    if (saving_) outcome.save_failure = saving_->failure();
    return outcome;
  }

 private:
  static fsdp::EngineOptions options_for(const TrainPlan& plan, const std::string& strategy, bool measure_norm) {
    fsdp::EngineOptions options = engine_options(plan, strategy);
    options.measure_norm = measure_norm;
    return options;
  }

  StepReport train_step(std::int64_t step, const TrainingCallbacks& callbacks) {
    if (recorder_) recorder_->begin_step();
    const std::int64_t start = base::host_time_ns();
    comm::record_step(world_, step + 1);
    run_microbatches(step);
    record_model_state();
    std::optional<double> own;
    if (callbacks.before_update) callbacks.before_update(engine_, own.emplace(task_->mean_loss()));
    const double rate = nn::learning_rate(plan_.schedule, step + 1);
    engine_.step(rate);
    record_model_state();
    const std::int64_t updated = base::host_time_ns();
    if (!own) own = task_->mean_loss();  // the only wait of a step: all earlier work is queued
    const double mean = mean_over_ranks(*own);
    StepReport report{.step = step + 1, .loss = mean, .learning_rate = rate};
    if (scaler_) {
      report.skipped = !scaler_->after_step();
      report.loss_scale = scaler_->scale();
      report.skipped_steps = scaler_->state().skipped_steps;
    }
    losses_.push_back(mean);
    const double ms = static_cast<double>(base::host_time_ns() - start) / 1e6;
    record_times(ms);
    if (records_parts()) parts_.push_back(cut_step(start, updated, last_events_, take_record(*slow_world_)));
    if (recorder_) recorder_->end_step(report.step, last_events_);
    report.tokens_per_second = static_cast<double>(plan_.options.global_batch * plan_.seq_len) / ms * 1e3;
    if (peak_flops_)
      report.mfu = model_flops_utilization(plan_, report.tokens_per_second, *peak_flops_ * world_.size());
    const base::MemoryTracker::Snapshot memory = memory_tracker_.snapshot();
    report.live_bytes = memory.total_now;
    report.peak_bytes = memory.total_peak;
    if (engine_.options().measures_norm()) report.grad_norm = unsigned_nan(engine_.grad_norm());
    // The scaler skips steps whose norm is not finite: their parameters don't change.
    divergence_.after_step(
        report.step, *own, mean,
        engine_.options().measures_norm() && !scaler_ ? std::optional(report.grad_norm) : std::nullopt);
    return report;
  }

  void run_microbatches(std::int64_t step) {
    const std::int64_t count = plan_.options.global_batch / world_.size() / plan_.options.accumulate;
    const double scale = (scaler_ ? scaler_->scale() : 1.0) / static_cast<double>(plan_.options.accumulate);
    for (std::int64_t i = 0; i < plan_.options.accumulate; ++i) {
      engine_.set_is_last_backward(i + 1 == plan_.options.accumulate);
      const std::int64_t first = count * (world_.rank() * plan_.options.accumulate + i);
      task_->forward_backward(step, {first, first + count}, scale);
    }
    if (graphed_ && !graphed_->obstacle().empty() && !std::exchange(told_obstacle_, true) && world_.logger() != nullptr)
      world_.logger()->write(base::LogLevel::info, "steps are not replayed: " + graphed_->obstacle());
  }

  double mean_over_ranks(double loss) {
    if (world_.size() > 1) control_.all_reduce(&loss, 1, comm::ReduceOp::avg(), "loss");
    return unsigned_nan(loss);
  }

  void record_model_state() {
    const auto now = memory_tracker_.snapshot();
    const auto raise = [](std::uint64_t& most, std::uint64_t value) { most = std::max(most, value); };
    raise(state_.parameter, now.now_of(MemoryCategory::parameter));
    raise(state_.gradient, now.now_of(MemoryCategory::gradient));
    raise(state_.optimizer, now.now_of(MemoryCategory::optimizer));
  }

  void record_times(double ms) {
    last_events_ = engine_.trace().drain();
    step_ms_.push_back(ms);
    exposed_ms_.push_back(static_cast<double>(exposed_ns(last_events_)) / 1e6);
  }

  bool records_parts() const { return slow_world_ != nullptr && plan_.links->record; }

  std::int64_t steps_to_do() const { return plan_.options.steps - plan_.first_step; }

  /// Traffic is counted from the end of the first step, if there is another: the formulas describe every step after it,
  /// or the mean over a sync period.
  std::int64_t counted_steps() const {
    const std::int64_t later = steps_to_do() - 1, period = sync_period(engine_.options().strategy);
    return std::max<std::int64_t>(1, later >= period ? later - later % period : later);
  }

  void note_counters(std::int64_t steps_done) {
    const std::int64_t first = steps_to_do() == 1 ? 0 : 1;
    const bool begins = steps_done == first, ends = steps_done == first + counted_steps();
    if (!begins && !ends) return;
    engine_.wait();
    const Counters now{engine_.stats().traffic(), world_.traffic(), engine_.stats().copied_bytes()};
    (begins ? first_ : last_) = now;
  }

  /// Fills what this rank called, sent and copied per step.
  void add_traffic(RunResult& r) const {
    if (steps_to_do() <= 0) return;
    const auto counted = static_cast<std::uint64_t>(counted_steps());
    fsdp::EngineTraffic traffic = last_.engine - first_.engine;
    const comm::TrafficStats loss = last_.world - first_.world;
    traffic.control.calls += loss.calls();
    traffic.control.bytes_sent += loss.bytes_sent();
    r.calls_per_step = calls_of(traffic, counted);
    r.wire_bytes_per_step = bytes_of(traffic, counted);
    r.copied_bytes_per_step = (last_.copied_bytes - first_.copied_bytes) / counted;
  }

  Bytes formula_bytes(const fsdp::Strategy& strategy) const {
    const auto f = fsdp::communication_formula(strategy, engine_.mesh().shape(), engine_.stats().unit_sizes(),
                                               plan_.precision, step_shape_of(plan_.options));
    Bytes bytes{f.bytes.all_gather, f.bytes.reduce_scatter, f.bytes.all_reduce, 0};
    bytes.control = engine_.stats().control_formula_bytes();
    if (world_.size() > 1)
      bytes.control += comm::direct_bytes_sent(comm::OpKind::all_reduce, 1, sizeof(double), world_.size(), 0);
    return bytes;
  }

  RunResult summarize();

  const TrainPlan& plan_;
  comm::Communicator& world_;
  base::MemoryTracker& memory_tracker_;
  nn::Context context_;
  comm::HostCollectives control_;
  Counters first_, last_;                           // before and after the counted steps
  std::unique_ptr<comm::Communicator> slow_world_;  // with --link; losses and results of the run don't pass it
  DivergenceMonitor divergence_;
  std::unique_ptr<fsdp::TrainingTask> task_;
  fsdp::Engine engine_;
  const std::optional<double> peak_flops_;      // of a rank
  std::optional<StepRecorder> recorder_;        // with --report
  std::optional<fsdp::GradientScaler> scaler_;  // of f16
  std::optional<RunCheckpointer> saving_;
  std::optional<fsdp::GraphedStep> graphed_;  // nothing: steps are not replayed
  bool told_obstacle_ = false;
  std::vector<double> losses_;
  std::vector<double> step_ms_, exposed_ms_;  // of this rank
  std::vector<StepParts> parts_;              // if the links record
  RunResult::ModelState state_;
  std::vector<TraceEvent> last_events_;
};

RunResult Trainer::summarize() {
  RunResult r;
  r.strategy = engine_.options().strategy.name;
  const int replicas = engine_.mesh().shape().size_of(fsdp::kReplicateAxis);
  r.mesh = {replicas, engine_.mesh().shape().size() / replicas};
  r.units = engine_.stats().units();
  r.losses = losses_;
  if (scaler_) r.skipped_steps = scaler_->state().skipped_steps;
  r.replayed = graphed_ && graphed_->replays();
  r.formula_bytes_per_step = formula_bytes(engine_.options().strategy);
  fsdp::Strategy plain = engine_.options().strategy;
  plain.all_gather = plain.reduce_scatter = plain.all_reduce = "plain";
  r.plain_bytes_per_step = formula_bytes(plain);

  add_traffic(r);
  r.model_state_bytes = state_;
  const base::MemoryTracker::Snapshot peak = memory_tracker_.snapshot();
  r.peak_bytes.total_peak = peak.total_peak;
  r.peak_bytes.reserved = peak.reserved;
  r.peak_bytes.peak = peak.peak;
  auto& [parameter, gradient, optimizer] = r.model_state_bytes;
  Bytes& sent = r.wire_bytes_per_step;
  std::vector<std::uint64_t*> figures;
  for (std::uint64_t& bytes : r.peak_bytes.peak) figures.push_back(&bytes);
  for (std::uint64_t* const figure :
       {&sent.all_gather, &sent.reduce_scatter, &sent.all_reduce, &sent.control, &r.copied_bytes_per_step, &parameter,
        &gradient, &optimizer, &r.peak_bytes.total_peak, &r.peak_bytes.reserved})
    figures.push_back(figure);
  const auto most = largest(control_, each_of(figures, [](const std::uint64_t* figure) { return *figure; }));
  for (std::size_t i = 0; i < most.size(); ++i) *figures[i] = most[i];

  // The slowest rank of each step; exposed time by rank, because a fast rank's wait is another's compute.
  const std::vector<double> warm = without_warm_up(largest(control_, step_ms_));
  const int period = sync_period(engine_.options().strategy);
  for (const auto& rank : control_.gather_all(exposed_ms_))
    r.exposed_communication_ms = std::max(r.exposed_communication_ms, median(by_period(without_warm_up(rank), period)));
  if (slow_world_ && !plan_.fits_links) r.link = latest(control_, *slow_world_);
  if (plan_.fits_links) r.link_fit = fit_link(world_);
  if (records_parts()) r.parts = mean_over(control_, parts_);
  r.step_ms_median = median(by_period(warm, period));
  r.step_ms_p95 = percentile(warm, 0.95);
  const double total_ms = std::accumulate(warm.begin(), warm.end(), 0.0);
  if (total_ms > 0)
    r.tokens_per_second = static_cast<double>(plan_.options.global_batch * plan_.seq_len) *
                          static_cast<double>(warm.size()) / total_ms * 1e3;
  return r;
}

}  // namespace

Calls calls_of(const fsdp::EngineTraffic& t, std::uint64_t steps) {
  const auto mean = [&](std::uint64_t calls) { return static_cast<double>(calls) / static_cast<double>(steps); };
  return {mean(t.all_gather.calls), mean(t.reduce_scatter.calls), mean(t.all_reduce.calls), mean(t.control.calls)};
}

Bytes bytes_of(const fsdp::EngineTraffic& t, std::uint64_t steps) {
  return {t.all_gather.bytes_sent / steps, t.reduce_scatter.bytes_sent / steps, t.all_reduce.bytes_sent / steps,
          t.control.bytes_sent / steps};
}

TrainingOutcome run_training(const TrainPlan& plan, const std::string& strategy, comm::Communicator& world,
                             const std::shared_ptr<base::MemoryTracker>& memory_tracker,
                             const TrainingCallbacks& callbacks) {
  try {
    Trainer training(plan, strategy, world, memory_tracker, callbacks.measure_norm);
    training.train(callbacks);
    return training.finish();
  } catch (const std::exception& error) {
    comm::record_failure(world, error.what());
    throw;
  }
}

}  // namespace tessera::tools
