// Optimizers over flat ranges. The formulas are PyTorch's; the tests state them exactly. The engine calls update() on
// its shards.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

/// Settings of an optimizer, with PyTorch's names and meanings.
struct OptimizerConfig {
  /// The update formula.
  enum class Kind : std::uint8_t {
    sgd,   ///< stochastic gradient descent
    adam,  ///< adds weight decay to the gradient
    adamw  ///< decays the parameter
  };
  Kind kind = Kind::adamw;  ///< default: AdamW
  double beta1 = 0.9;       ///< decay of the first moment; adam and adamw
  double beta2 = 0.999;     ///< decay of the second moment; adam and adamw
  double eps = 1e-8;        ///< added to the root of the second moment; adam and adamw
  /// Factor; not for norms and biases (OptimizerRange::decay). Nothing: PyTorch's default, 0.01 for adamw, else 0.
  std::optional<double> weight_decay;
  double momentum = 0.0;  ///< of sgd; 0: no state
  bool nesterov = false;  ///< of sgd, with momentum
  bool amsgrad = false;   ///< of adam and adamw
  bool maximize = false;  ///< true: ascends the gradient
  double decay() const { return weight_decay.value_or(kind == Kind::adamw ? 0.01 : 0.0); }  ///< of the weights
};

/// "sgd", "adam", "adamw". Throws InvalidUsage.
TESSERA_API OptimizerConfig::Kind parse_optimizer(std::string_view name);
/// Throws InvalidUsage for values that are out of range or contradictory (beta outside [0, 1), nesterov without
/// momentum, amsgrad with sgd, ...).
TESSERA_API void validate(const OptimizerConfig& config);

/// f32 values of state per parameter: adam and adamw 2, with amsgrad 3; sgd 0, with momentum 1.
TESSERA_API int state_slots(const OptimizerConfig& config);
/// The most values that state_slots() returns.
inline constexpr int kMaxStateSlots = 3;

/// Settings of one step, the same for all ranges.
struct OptimizerStep {
  std::uint64_t number = 1;     ///< from 1
  double learning_rate = 1e-3;  ///< of this step
  /// The update multiplies gradients by *gradient_scale (clipping, unscaling) and reads it when it runs on the stream.
  /// Null: 1. NaN: nothing is changed.
  const double* gradient_scale = nullptr;
};

/// Elements of a range with or without weight decay: from the end of the part before (from 0 if it is the first) on.
struct DecayRange {
  std::int64_t end = 0;  ///< of the last part: the range's count
  bool decay = true;     ///< false: norms and biases
};

/// `count` consecutive elements, which are updated in one launch.
struct OptimizerRange {
  float* values = nullptr;                        ///< for half-precision parameters: their f32 master weights
  const float* gradients = nullptr;               ///< null if half.gradient holds them
  std::array<float*, kMaxStateSlots> state = {};  ///< the first state_slots() are used; zeros before the first step
  std::int64_t count = 0;                         ///< elements of each array
  bool decay = true;                              ///< false: norms and biases; unused with `parts`
  kernels::HalfStep half = {};  ///< half-precision gradients, and parameters that get the rounded master weights
  std::span<const DecayRange> parts = {};  ///< none: all elements have the same weight decay
};

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
    Buffer master;  // of a half-precision parameter
  };
  const OptimizerConfig config_;
  std::vector<Entry> entries_;
  std::uint64_t steps_ = 0;
};

}  // namespace tessera::nn
