// Optimizers over flat ranges. (Interface fixed by the engine, which calls update() on its shards; see the tests for
// the exact formulas: they are PyTorch's.)
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "tessera/nn/module.h"

namespace tessera::nn {

struct OptimizerConfig {
  enum class Kind : std::uint8_t { sgd, adam, adamw };
  Kind kind = Kind::adamw;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
  double momentum = 0.0;
  bool nesterov = false;
  bool amsgrad = false;
  bool maximize = false;
};

/// "sgd", "adam", "adamw". Throws InvalidUsage.
TESSERA_API OptimizerConfig::Kind parse_optimizer(std::string_view name);
/// Throws InvalidUsage for values that make no sense (beta outside [0, 1), nesterov without momentum, amsgrad with sgd,
/// ...).
TESSERA_API void validate(const OptimizerConfig& config);

/// f32 values kept per parameter: adam and adamw 2, with amsgrad 3; sgd 0, with momentum 1.
TESSERA_API int state_slots(const OptimizerConfig& config);
inline constexpr int kMaxStateSlots = 3;

/// One step, the same for all ranges.
struct OptimizerStep {
  std::uint64_t number = 1;  ///< 1 is the first
  double learning_rate = 1e-3;
  /// Gradients are multiplied by *gradient_scale before use (clipping, unscaling); read when the stream gets there. Null:
  /// 1. NaN: nothing is changed.
  const double* gradient_scale = nullptr;
};

/// `count` consecutive elements of equal weight decay.
struct OptimizerRange {
  float* values = nullptr;                        ///< where parameters have 16 bits: their f32 masters
  const float* gradients = nullptr;               ///< null where narrow.gradient holds them
  std::array<float*, kMaxStateSlots> state = {};  ///< the first state_slots() are used; zero before the first step
  std::int64_t count = 0;
  bool decay = true;                ///< false: norms and biases
  kernels::NarrowStep narrow = {};  ///< 16-bit gradients, and parameters that get the rounded masters
};

/// Appends the update to the context's stream. An element's update depends on its own values only.
TESSERA_API void update(Context& context, const OptimizerConfig& config, const OptimizerStep& step,
                        const OptimizerRange& range);

/// Training alone: owns the state of a model's parameters, and f32 masters of those of 16 bits, which begin as these
/// are when it is made. Gradients are those of the last backward; step() clears
/// them.
class TESSERA_API Optimizer {
 public:
  Optimizer(Module& model, OptimizerConfig config);
  void step(double learning_rate);

 private:
  struct Entry {
    std::shared_ptr<Parameter> parameter;
    std::vector<Buffer> state;
    Buffer master;  // of a 16-bit parameter
  };
  const OptimizerConfig config_;
  std::vector<Entry> entries_;
  std::uint64_t steps_ = 0;
};

}  // namespace tessera::nn
