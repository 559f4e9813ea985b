// Optimizers over flat ranges. The formulas are PyTorch's; the tests state them exactly. The engine calls update() on
// its shards.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "tessera/base/optimizer.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// Appends the update to the context's stream. The update of an element depends only on its own values.
TESSERA_API void update(Context& context, const OptimizerConfig& config, const OptimizerStep& step,
                        const OptimizerRange& range);

/// Optimizer without an engine: owns the state of a model's parameters, and f32 master weights of half-precision ones,
/// initialized from the parameters at construction. Gradients are those of the last backward; step() clears them.
class TESSERA_API Optimizer {
 public:
  /// `model` has memory and outlives the optimizer. Throws InvalidUsage for an invalid config.
  Optimizer(Module& model, OptimizerConfig config);
  void step(double learning_rate);  ///< updates the parameters that have a gradient; others stay unchanged

 private:
  struct Entry {
    std::shared_ptr<Parameter> parameter;
    std::vector<Buffer> state;
    Buffer master;  // master weights of a half-precision parameter
  };
  const OptimizerConfig config_;
  std::vector<Entry> entries_;
  std::uint64_t steps_ = 0;
};

}  // namespace tessera::nn
