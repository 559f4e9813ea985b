#include "tessera/fsdp/graphed_step.h"

#include "tessera/fsdp/engine/engine_core.h"
#include "tessera/fsdp/engine/unit_scheduler.h"

namespace tessera::fsdp {
namespace {

/// Disables trace events during capture: events are points of an executing stream, and a graph has none.
class WithoutEvents {
 public:
  explicit WithoutEvents(TraceRecorder& recorder) : recorder_(recorder) { recorder_.set_recording(false); }
  ~WithoutEvents() { recorder_.set_recording(true); }
  WithoutEvents(const WithoutEvents&) = delete;
  WithoutEvents& operator=(const WithoutEvents&) = delete;

 private:
  TraceRecorder& recorder_;
};

}  // namespace

GraphedStep::GraphedStep(Engine& engine, Uncapturable uncapturable)
    : engine_(engine), uncapturable_(uncapturable), obstacle_(engine_obstacle()) {
  if (uncapturable == Uncapturable::error && !obstacle_.empty()) throw InvalidUsage(obstacle_);
}

GraphedStep::~GraphedStep() {
  try {
    engine_.model().runtime().stream().synchronize();
  } catch (const std::exception&) {  // a failed device runs nothing any more
  }
}

std::string GraphedStep::engine_obstacle() const {
  const EngineCore& core = *engine_.core_;
  const int ranks = core.resources.mesh.size();
  if (ranks > 1) return "graphs: " + std::to_string(ranks) + " ranks synchronize streams; use one rank";
  if (core.resources.offload) return "graphs: cpu offload copies parameters on another stream; disable cpu_offload";
  for (const auto& unit : core.units)
    for (const FlatParameter& flat : unit->group.flats())
      if (flat.precision.casts())
        return "graphs: gradients are converted in leased buffers; reduce them in the dtype of the parameters";
  return "";
}

void GraphedStep::run_step(const std::function<void()>& step) {
  if (!std::exchange(warm_, true)) return step();
  if (graph_ == nullptr && obstacle_.empty()) record(step);
  if (graph_ == nullptr) return step();
  graph_->launch(engine_.model().runtime().stream());
  engine_.scheduler_->on_replayed();
}

void GraphedStep::record(const std::function<void()>& step) {
  try {
    capture(step);
  } catch (const base::Error& error) {
    if (uncapturable_ == Uncapturable::error) throw;
    obstacle_ = error.what();
    engine_.abort_step();
    memory_.reset();
  }
}

void GraphedStep::capture(const std::function<void()>& step) {
  // the graph has its own memory: free what the last step left idle, or it would be allocated twice
  MemoryPool& memory = engine_.model().runtime().memory();
  memory.trim();
  memory_ = memory.make_keeping();
  const WithoutEvents without(engine_.trace());
  graph_ = engine_.model().runtime().capture(*memory_, step);
}

}  // namespace tessera::fsdp
