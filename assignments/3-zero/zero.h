// Assignment 3: what you write in zero.cpp, and what you can use.
#pragma once

#include <memory>
#include <span>

#include "tessera/comm/communicator.h"

namespace assignment {

/// One step of AdamW on some elements: `values` are updated, and so are the moments `m` and `v`, which are 0 before the
/// first step. `step` counts from 1. All have the same length.
void adamw(std::span<float> values, std::span<const float> gradients, std::span<float> m, std::span<float> v, int step);

/// The sum of the squares.
double squares(std::span<const float> values);

/// An optimizer whose state is sharded over the ranks.
class ZeroOptimizer {
 public:
  virtual ~ZeroOptimizer() = default;
  /// Averages the gradients over the ranks and updates the parameters of all ranks. `gradients`: this rank's, as many
  /// as there are parameters.
  virtual void step(std::span<const float> gradients) = 0;
};

/// `parameters` are the same on all ranks and outlive the result, as `world` does. `max_norm`: the largest norm of the
/// averaged gradients, 0 for any.
std::unique_ptr<ZeroOptimizer> zero_optimizer(tessera::comm::Communicator& world, std::span<float> parameters,
                                              double max_norm);

}  // namespace assignment
