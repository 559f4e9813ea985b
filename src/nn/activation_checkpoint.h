// Activation checkpointing: a part of a forward keeps its inputs only, and is computed again when its backward comes.
//
//   nn::checkpoint_activations(model);                      // every block of a model, or those that a predicate picks
//   y = nn::checkpoint(context, [&](const Tensor& x) { return second(first(x)); }, x);   // a region of one's own
#pragma once

#include <functional>
#include <utility>

#include "tessera/nn/tensor.h"

namespace tessera::nn {

class Module;

/// What `region` returns; its gradients are those of calling it, to the bit. While a tape records, the region's own
/// activations are dropped at once, and the backward calls `region` again, with the random state and the mode of
/// training of now, and walks what that records. Without a tape it is an ordinary call.
///
/// `region` is kept until its backward has run, and with it what it captures. It must compute the same again: so it
/// leaves its inputs as they are (ops::rope rotates in place) and reads nothing that changes in between but parameters
/// that an engine moves. Throws InvalidUsage in the backward where the second result has another shape or type.
/// `module`: whose hooks learn of the second call, as Phase::recompute; null: nobody's.
TESSERA_API Tensor run_checkpointed(Context& context, std::function<Tensor()> region, Module* module = nullptr);

/// run_checkpointed(function(inputs...)): `inputs` are copied, which for tensors means their handles.
template <class Function, class... Inputs>
Tensor checkpoint(Context& context, Function function, Inputs... inputs) {
  return run_checkpointed(
      context, [function = std::move(function), ... inputs = std::move(inputs)] { return function(inputs...); });
}

/// Turns Module::checkpoint_activations() on for those modules of `model` that `which` picks (nothing: the blocks), and
/// off for the others. Returns how many were picked. Throws InvalidUsage for none: the model has no such module.
TESSERA_API int checkpoint_activations(Module& model, const std::function<bool(const Module&)>& which = {});

}  // namespace tessera::nn
