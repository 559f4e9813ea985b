// Forward and backward as one captured device graph: for models so small that launching their kernels takes longer than
// running them.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "tessera/fsdp/engine.h"

namespace tessera::fsdp {

/// What becomes of steps that a graph can't contain.
enum class Uncapturable : std::uint8_t {
  error,     ///< the constructor or run() throws the reason
  runs_step  ///< run() calls them as if there were no graphs, and obstacle() says why
};

/// Captures the steps of one engine and batch shape. Used by the engine's thread, and destroyed before the engine.
/// Engine::step() stays outside the graph, since its arguments change. The memory of a step's activations is kept for
/// the object's lifetime. Trace events (Engine::trace()) cover only work that is not replayed.
class TESSERA_API GraphedStep {
 public:
  /// Throws InvalidUsage, with the reason, if a step of this engine is not the same work on one stream each time,
  /// unless `uncapturable` says otherwise.
  explicit GraphedStep(Engine& engine, Uncapturable uncapturable = Uncapturable::error);
  /// Waits for the stream's work.
  ~GraphedStep();

  /// Returns the loss, after forward and backward; the next call may overwrite it. `step` computes both from tensors
  /// whose addresses stay the same, whatever their values: the first call runs it, the second captures it, and later
  /// calls replay the graph without calling it. Throws Unsupported if the device has no graphs, InvalidUsage for work
  /// that a graph cannot contain (dropout, host work in between), and other errors of the capture. With
  /// Uncapturable::runs_step it then drops what the capture began (Engine::abort_step()) and calls `step` again, now
  /// and from now on; what `step` changes beside the engine, such as a counter of its own, has then changed twice.
  template <class Step>
  auto run(const Step& step) {
    using Loss = decltype(step());
    if (!replays()) loss_.reset();
    run_step([&] { loss_ = std::make_shared<Loss>(step()); });
    return *std::static_pointer_cast<Loss>(loss_);
  }

  bool replays() const { return graph_ != nullptr; }         ///< whether the step has been captured
  const std::string& obstacle() const { return obstacle_; }  ///< why it can't be; "" as long as nothing is known

 private:
  std::string engine_obstacle() const;
  void run_step(const std::function<void()>& step);
  void record(const std::function<void()>& step);
  void capture(const std::function<void()>& step);
  Engine& engine_;
  const Uncapturable uncapturable_;
  std::string obstacle_;
  bool warm_ = false;  // the first run creates tables and loads libraries
  std::unique_ptr<base::MemoryPool> memory_;
  std::unique_ptr<base::Graph> graph_;
  std::shared_ptr<void> loss_;  // loss of the last call
};

}  // namespace tessera::fsdp
