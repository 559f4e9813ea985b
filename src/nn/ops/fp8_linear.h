// The linear layer with operands in 8-bit floating point.
#pragma once

#include "tessera/nn/fp8.h"
#include "tessera/nn/ops/linear.h"

namespace tessera::nn::ops {

/// How fp8_linear() scales its operands.
struct Fp8Recipe {
  Fp8Scaling scaling = Fp8Scaling::current;  ///< scaling of x, the weight and y's gradient, each by itself
  Tensor history;                            ///< delayed: f32 [3, 1 + kFp8History], of x, the weight and y's gradient
  bool updates = false;                      ///< delayed: this call adds x and the weight to the history
};

/// linear(), whose three products multiply quantized operands: x and the weight in E4M3, y's gradient in E5M2, each
/// with one scale. Sums are f32, as are scales; the bias and its gradient are not quantized. Saves x transposed in 8
/// bits if the weight requires a gradient; an x that can be computed again (saved_tensor.h) is quantized again instead.
/// The weight is quantized anew in backward, so nothing of it stays in memory.
/// x and the weight are f32, f16 or bf16; inputs and outputs are multiples of kFp8Multiple, else InvalidUsage.
TESSERA_API Tensor fp8_linear(const Tensor& x, const Tensor& weight, const Tensor& bias, WeightLayout layout,
                              const Fp8Recipe& recipe);

}  // namespace tessera::nn::ops
