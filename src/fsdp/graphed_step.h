// Forward and backward as one graph of the device: for models so small that starting their kernels takes longer than
// running them.
#pragma once

#include <functional>
#include <memory>

#include "tessera/fsdp/engine.h"
#include "tessera/nn/context.h"

namespace tessera::fsdp {

/// Of one engine and batch shape; used by the engine's thread, and gone before the engine. Engine::step() stays
/// outside, since its numbers change. The memory of a step's activations is kept while it lives; events
/// (Engine::recorder()) are those of what is not replayed.
class TESSERA_API GraphedStep {
 public:
  /// Throws InvalidUsage, with the reason, where a step of this engine is not the same work on one stream each time.
  GraphedStep(nn::Context& context, Engine& engine);
  /// Waits for what runs.
  ~GraphedStep();
  GraphedStep(const GraphedStep&) = delete;
  GraphedStep& operator=(const GraphedStep&) = delete;

  /// The loss, after forward and backward; the next call may overwrite it. `step` computes both from tensors that stay
  /// in their place, whatever they hold: the first call runs it, the second records it, and from then on it is not
  /// called again. Throws Unsupported where the device has no graphs, InvalidUsage for what can't be part of one
  /// (dropout, the host in between).
  nn::Tensor run(const std::function<nn::Tensor()>& step);

 private:
  void record(const std::function<nn::Tensor()>& step);
  nn::Context& context_;
  Engine& engine_;
  bool warm_ = false;  // tables are made and libraries loaded when something runs for the first time
  std::unique_ptr<base::MemoryPool> memory_;
  std::unique_ptr<base::Graph> graph_;
  nn::Tensor loss_;
};

}  // namespace tessera::fsdp
