// Activation checkpointing of TESSERA_UNITs: a call saves only its inputs, and its backward computes the activations
// again. With and without an engine.
//
//   tessera::libtorch::checkpoint_activations(*model);   // all units below the model
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/base/export.h"

namespace tessera::libtorch {

class Boundary;

/// From now on the calls of the units below `model` that `which` selects are recomputed in backward, and those of the
/// others are not; empty: of the outermost units. Gradients of a chain of units are bitwise equal to those without;
/// elsewhere autograd may add the gradients of one tensor in another order. The recomputation draws the same numbers
/// from Torch's default generator; a unit must not draw from another one, must read nothing that has a gradient but its
/// arguments and parameters, and counts a batch twice in the statistics of a batch norm. Returns the number of selected
/// units. Throws InvalidUsage if there are none.
TESSERA_API int checkpoint_activations(torch::nn::Module& model,
                                       const std::function<bool(const torch::nn::Module&)>& which = {});

/// Returns the tensors of region(inputs), which is not recorded; their backward calls it again between the hooks of
/// `boundary` (null: none) and throws InvalidUsage if an input was changed in place meanwhile. `region` stays alive
/// until then.
TESSERA_API std::vector<at::Tensor> run_checkpointed(
    const std::shared_ptr<Boundary>& boundary, const std::vector<at::Tensor>& inputs,
    std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)> region);

}  // namespace tessera::libtorch
