// Activation checkpointing: a region of the forward saves only its inputs, and its backward recomputes the activations.
//
//   nn::checkpoint_activations(model);                      // all blocks of a model, or those that a predicate selects
//   y = nn::checkpoint(context, [&](const Tensor& x) { return second(first(x)); }, x);   // a user-defined region
#pragma once

#include <functional>
#include <utility>

#include "tessera/nn/tensor.h"

namespace tessera::nn {

class Module;

/// Returns the result of `region`; its gradients are bitwise equal to those of calling it directly. While a tape
/// records, the region's activations are freed at once. The backward calls `region` again, with the random state and
/// training mode of the first call, and runs the backward of what that call records. Without a tape this is an ordinary
/// call.
///
/// `region` and its captures stay alive until its backward has run. It must compute the same result again: it must not
/// modify its inputs (ops::rope rotates in place) and must read nothing that changes in between, except parameters that
/// an engine moves. The backward throws InvalidUsage if the second result has another shape or type. `module`: its
/// hooks are called for the recomputation, with Phase::recompute; null: no hooks.
TESSERA_API Tensor run_checkpointed(Context& context, std::function<Tensor()> region, Module* module = nullptr);

/// run_checkpointed(function(inputs...)). `inputs` are copied; for tensors, these are copies of the handles.
template <class Function, class... Inputs>
Tensor checkpoint(Context& context, Function function, Inputs... inputs) {
  return run_checkpointed(
      context, [function = std::move(function), ... inputs = std::move(inputs)] { return function(inputs...); });
}

/// Enables Module::checkpoint_activations() for the modules of `model` that `which` selects (empty: the blocks) and
/// disables it for the others. Returns the number of selected modules. Throws InvalidUsage if there are none.
TESSERA_API int checkpoint_activations(Module& model, const std::function<bool(const Module&)>& which = {});

}  // namespace tessera::nn
