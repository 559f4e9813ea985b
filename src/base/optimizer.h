// The arithmetic of a training step as data: what an engine asks a model's library to compute.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "tessera/base/dtype.h"
#include "tessera/base/export.h"

namespace tessera::base {

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
  double momentum = 0.0;  ///< momentum of sgd; 0: no state
  bool nesterov = false;  ///< Nesterov's momentum, of sgd
  bool amsgrad = false;   ///< AMSGrad, of adam and adamw
  bool maximize = false;  ///< true: ascends the gradient

  double decay() const { return weight_decay.value_or(kind == Kind::adamw ? 0.01 : 0.0); }  ///< decay of the weights
};

/// "sgd", "adam", "adamw". Throws InvalidUsage.
TESSERA_API OptimizerConfig::Kind parse_optimizer(std::string_view name);
/// The name that parse_optimizer() reads.
TESSERA_API std::string_view name_of(OptimizerConfig::Kind kind);
/// Throws InvalidUsage for values that are out of range or contradictory (beta outside [0, 1), nesterov without
/// momentum, amsgrad with sgd, ...).
TESSERA_API void validate(const OptimizerConfig& config);
/// f32 values of state per parameter: adam and adamw 2, with amsgrad 3; sgd 0, with momentum 1.
TESSERA_API int state_slots(const OptimizerConfig& config);
/// The most values that state_slots() returns.
inline constexpr int kMaxStateSlots = 3;

/// Settings of one step, the same for all ranges.
struct OptimizerStep {
  std::uint64_t number = 1;     ///< number of the step, from 1
  double learning_rate = 1e-3;  ///< learning rate of this step
  /// The update multiplies gradients by *gradient_scale (clipping, unscaling) and reads it when it runs on the stream.
  /// Null: 1. NaN: nothing is changed.
  const double* gradient_scale = nullptr;
};

/// Elements of a range with or without weight decay: from the end of the part before (from 0 if it is the first) on.
struct DecayRange {
  std::int64_t end = 0;  ///< end of the part; of the last one the range's count
  bool decay = true;     ///< false: norms and biases
};

/// Half-precision values beside the f32 values that a step updates, read and written in the same pass.
struct HalfStep {
  DType dtype = DType::f32;        ///< f16 or bf16; f32: none
  const void* gradient = nullptr;  ///< not null: read instead of the step's own gradient, which is null
  void* copy = nullptr;            ///< not null: gets the new parameters, rounded once
};

/// `count` consecutive elements, which are updated in one launch.
struct OptimizerRange {
  float* values = nullptr;           ///< values to update; of half-precision parameters their f32 master weights
  const float* gradients = nullptr;  ///< null if half.gradient holds them
  std::array<float*, kMaxStateSlots> state = {};  ///< the first state_slots() are used; zeros before the first step
  std::int64_t count = 0;                         ///< elements of each array
  bool decay = true;                              ///< false: norms and biases; unused with `parts`
  HalfStep half = {};  ///< half-precision gradients, and parameters that get the rounded master weights
  std::span<const DecayRange> parts = {};  ///< none: all elements have the same weight decay
};

/// A vector norm: (sum of |x|^p)^(1/p), or the largest |x|.
enum class Norm : std::uint8_t {
  one,      ///< p = 1
  two,      ///< p = 2
  three,    ///< p = 3
  infinity  ///< the largest |x|
};

/// out[i] = the partial result, in f64, of a norm of x[i * count, (i + 1) * count).
struct NormSlices {
  Norm norm = Norm::two;     ///< norm of the partial results
  DType dtype = DType::f32;  ///< dtype of x; floating
  const void* x = nullptr;   ///< [slices, count]
  std::size_t count = 0,     ///< elements of a slice
      slices = 1;            ///< number of slices
  /// [slices]: zeros, which kernels that split a slice use to combine it, and leave zero. Calls on one stream may share
  /// them.
  std::uint32_t* counters = nullptr;
  double* out = nullptr;  ///< [slices]
};

/// Input parts[count], the partial results of a norm; out[0] = norm / loss_scale; out[1] = the factor that unscales and
/// clips a gradient: min(1, most / (out[0] + 1e-6)) / loss_scale, or 1 / loss_scale without `most`. Parts are added in
/// order.
struct ClipArgs {
  Norm norm = Norm::two;            ///< norm of the partial results
  const double* parts = nullptr;    ///< [count]
  std::size_t count = 0;            ///< partial results
  std::optional<double> most = {};  ///< largest norm; empty: no clipping
  double loss_scale = 1;            ///< factor on the loss
  bool skips = false;               ///< if the norm isn't finite, out[1] is NaN, so that the optimizer changes nothing
  double* out = nullptr;            ///< [2]
};

}  // namespace tessera::base
