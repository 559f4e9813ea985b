#include "tessera/plan/simulation.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/fsdp/nn_task.h"
#include "tessera/nn/attention_library.h"

namespace tessera::plan {
namespace {

/// See make_token_task().
class TokenTask final : public fsdp::NnTask {
 public:
  TokenTask(std::unique_ptr<nn::CausalModel> model, std::int64_t positions)
      : NnTask(std::move(model), 0), positions_(positions) {}
  std::int64_t tokens_per_sample() const override { return positions_; }

 protected:
  nn::Tensor loss(std::int64_t /*step*/, base::ElementRange samples) override {
    tokens_ = token_ids(samples.count());
    targets_ = token_ids(samples.count());
    return module_as<nn::CausalModel>().loss(tokens_, targets_);
  }
  nn::Tensor run_step(std::int64_t step, base::ElementRange samples, double scale) override {
    nn::Tensor loss = NnTask::run_step(step, samples, scale);
    tokens_ = targets_ = {};
    return loss;
  }

 private:
  nn::Tensor token_ids(std::int64_t sequences) {
    nn::Tensor ids = nn::Tensor::empty(context(), {sequences, positions_}, base::DType::i32);
    context().device_kernels().positions(context().stream(), ids.data<std::int32_t>(),
                                         static_cast<std::size_t>(ids.count()),
                                         static_cast<std::size_t>(module_as<nn::CausalModel>().config().vocabulary));
    return ids;
  }
  nn::Tensor tokens_, targets_;  // until the backward is done, as in a training
  const std::int64_t positions_;
};

void record(fsdp::ModelStateBytes& state, const base::MemoryTracker::Snapshot& now) {
  state.parameter = std::max(state.parameter, now.now_of(base::MemoryCategory::parameter));
  state.gradient = std::max(state.gradient, now.now_of(base::MemoryCategory::gradient));
  state.optimizer = std::max(state.optimizer, now.now_of(base::MemoryCategory::optimizer));
}

/// The marks of a step on the compute stream. Their times are asked for when no step follows: on a virtual clock, later
/// work can change those of work in flight.
struct StepMarks {
  base::Event begin, end;
  std::size_t first_event = 0;  // of the step, among the trace's
  StepTimes times;              // its tasks and its memory
};

/// `events`: of all steps.
std::vector<StepTimes> times_of(std::vector<StepMarks> steps, const std::vector<base::TraceEvent>& events) {
  std::vector<StepTimes> all;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::size_t end = i + 1 < steps.size() ? steps[i + 1].first_event : events.size();
    const auto at = [&](std::size_t event) { return events.begin() + static_cast<std::ptrdiff_t>(event); };
    StepTimes& times = all.emplace_back(std::move(steps[i].times));
    times.begin_ns = steps[i].begin.time_ns();
    times.step_ns = steps[i].end.time_ns() - times.begin_ns;
    times.events.assign(at(steps[i].first_event), at(end));
    for (const base::TraceEvent& event : times.events)
      if (event.kind == base::TraceEventKind::unshard_wait || event.kind == base::TraceEventKind::reduce_wait)
        times.exposed_ns += event.duration_ns();
  }
  return all;
}

/// Profiles copies of two sizes, because training on the host may make none.
void time_copies(nn::Context& context) {
  base::DeviceRuntime& runtime = context.runtime();
  for (const std::size_t bytes : {std::size_t{1} << 12, std::size_t{1} << 22}) {
    const base::Buffer from = context.memory().allocate(bytes, base::MemoryCategory::other);
    const base::Buffer to = context.memory().allocate(bytes, base::MemoryCategory::other);
    for (int i = 0; i < 3; ++i) {
      runtime.fill(context.stream(), from.data(), 0, bytes);
      runtime.copy(context.stream(), base::CopyDirection::device_to_device, to.data(), from.data(), bytes);
    }
  }
}

/// Keeps the changes of a rank's memory while it lives. Those of a prediction have positions of the compute stream
/// until its end, since a clock that is asked for the time computes that of all tasks.
class MemoryRecording {
 public:
  /// `clock`: null for a step that is measured.
  MemoryRecording(base::MemoryTracker& tracker, base::Stream& stream, const VirtualClock* clock)
      : tracker_(tracker), clock_(clock) {
    if (clock == nullptr)
      tracker_.keep_history(true);
    else
      tracker_.keep_history(true, [clock, &stream] { return static_cast<std::int64_t>(clock->position(stream)); });
  }
  ~MemoryRecording() { tracker_.keep_history(false); }
  MemoryRecording(const MemoryRecording&) = delete;
  MemoryRecording& operator=(const MemoryRecording&) = delete;

  /// Since the last call.
  base::MemoryHistory drain() {
    base::MemoryHistory history = tracker_.drain_history();
    if (clock_ != nullptr)
      for (base::MemoryChange& change : history.changes)
        change.at_ns = clock_->times_of(static_cast<TaskId>(change.at_ns)).end_ns;
    return history;
  }

 private:
  base::MemoryTracker& tracker_;
  const VirtualClock* clock_;
};

void check(const char* function, const TrainingStep& step, int steps) {
  const auto refuse = [&](const std::string& problem) {
    throw base::InvalidUsage(std::string(function) + ": " + problem);
  };
  if (steps < 1) refuse(std::to_string(steps) + " steps, needs 1 or more");
  if (step.continuous && step.memory_history)
    refuse("memory_history needs steps that end before the next one begins; set continuous to false");
}

/// `clock`: null for a step that is measured.
StepProfile run(const TrainingStep& step, comm::Communicator& world, nn::Context& context, const VirtualClock* clock,
                int steps) {
  const std::unique_ptr<fsdp::TrainingTask> task = step.make_task(context);
  fsdp::Engine engine(task->model(), world, step.engine);
  engine.initialize(0);
  base::Stream& stream = task->model().runtime().stream();
  std::optional<MemoryRecording> memory;
  if (step.memory_history) memory.emplace(context.memory_tracker(), stream, clock);
  const auto position = [&] { return clock == nullptr ? 0 : clock->position(stream); };
  const auto issued = [&] { return clock == nullptr ? 0 : static_cast<TaskId>(clock->graph().tasks().size()); };
  StepProfile profile;
  std::vector<StepMarks> marks;
  fsdp::EngineTraffic first;
  std::uint64_t first_copied = 0;
  engine.trace().drain();
  for (int i = 0; i < steps; ++i) {
    if (memory) memory->drain();
    StepMarks& mark = marks.emplace_back();
    mark.first_event = engine.trace().size();
    mark.begin = stream.record_timed();
    mark.times.begin_task = position();
    mark.times.first_issued = issued();
    run_microbatches(step, *task, engine, i);
    record(profile.model_state, context.memory_tracker().snapshot());
    engine.step(1e-3);
    record(profile.model_state, context.memory_tracker().snapshot());
    if (!step.continuous) engine.wait();
    mark.end = stream.record_timed();
    mark.times.end_task = position();
    mark.times.issued_end = issued();
    if (memory) mark.times.memory = memory->drain();
    static_cast<void>(task->mean_loss());  // a training loop reads it at the end of the step
    if (i > 0) continue;
    first = engine.stats().traffic();
    first_copied = engine.stats().copied_bytes();
  }
  profile.steps = times_of(std::move(marks), engine.trace().drain());
  engine.wait();  // its waits are of no step
  profile.traffic = engine.stats().traffic() - first;
  profile.copied_bytes = engine.stats().copied_bytes() - first_copied;
  profile.units = engine.stats().units();
  profile.unit_sizes = engine.stats().unit_sizes();
  profile.mesh = engine.mesh().shape();
  profile.memory = context.memory_tracker().snapshot();
  return profile;
}

}  // namespace

std::unique_ptr<fsdp::TrainingTask> make_token_task(std::unique_ptr<nn::CausalModel> model, std::int64_t positions) {
  return std::make_unique<TokenTask>(std::move(model), positions);
}

void run_microbatches(const TrainingStep& step, fsdp::TrainingTask& task, fsdp::Engine& engine, int number) {
  for (int i = 0; i < step.microbatches; ++i) {
    engine.set_is_last_backward(i + 1 == step.microbatches);
    task.forward_backward(number, {i * step.samples, (i + 1) * step.samples}, 1.0 / step.microbatches);
  }
}

StepProfile profile_step(const TrainingStep& step, comm::Communicator& world, int steps) {
  check("profile_step", step, steps);
  KernelProfiler measurement;
  nn::Context context({.threads = step.threads,
                       .memory_tracker = world.memory_tracker(),
                       .runtime = nn::observe(base::open_device({}), measurement),
                       .products = step.products});
  time_copies(context);
  StepProfile record = run(step, world, context, nullptr, steps);
  record.kernels = measurement.times();
  return record;
}

StepProfile predict_step(const TrainingStep& step, comm::Communicator& world, VirtualClock& clock,
                         const KernelTime& kernels, int steps) {
  KernelSimulator simulator(clock, kernels);
  return predict_step(step, world, clock, simulator, steps);
}

StepProfile predict_step(const TrainingStep& step, comm::Communicator& world, VirtualClock& clock,
                         nn::KernelInterceptor& kernels, int steps) {
  check("predict_step", step, steps);
  const base::Device meta{base::DeviceType::meta, 0};
  const auto make_stream = [&clock, meta] { return clock.make_stream(meta); };
  // A machine whose host only issues work has GPUs.
  nn::PlannedKernels planned = nn::PlannedKernels::host;
  if (clock.machine() == VirtualClock::Machine::asynchronous)
    planned = nn::attention_library_of_environment() == nn::AttentionLibrary::own
                  ? nn::PlannedKernels::gpu_without_cudnn
                  : nn::PlannedKernels::gpu;
  nn::Context context({.threads = step.threads,
                       .memory_tracker = world.memory_tracker(),
                       .make_stream = make_stream,
                       .device = meta,
                       .runtime = nn::observe(base::open_device(meta), kernels, make_stream),
                       .planned = planned,
                       .products = step.products});
  StepProfile record = run(step, world, context, &clock, 1 + steps);
  record.steps.erase(record.steps.begin());
  return record;
}

}  // namespace tessera::plan
