#include "tessera/nn/activation_checkpoint.h"

#include "tessera/nn/module.h"

namespace tessera::nn {
namespace {

struct Region {
  Context& context;
  std::function<Tensor()> call;
  Module* module;
  ForwardState state;
};

Tensor call_again(const Region& region, Tape& tape) {
  const ForwardStateScope state(region.context, region.state);
  const TapeScope recording(region.context, &tape);
  if (region.module != nullptr) region.module->notify_recompute_begins();
  Tensor y = region.call();
  if (region.module != nullptr) region.module->notify_recompute_ends();
  return y;
}

void backward(const Region& region, Gradient& dy) {
  Tape tape(Phase::recompute);
  {
    const Tensor y = call_again(region, tape);
    const Tensor& from = dy.value();
    if (y.shape() != from.shape() || y.dtype() != from.dtype())
      throw InvalidUsage("checkpoint: the region returned " + to_string(from.shape()) + " " +
                         std::string(name_of(from.dtype())) + ", but in the backward " + to_string(y.shape()) + " " +
                         std::string(name_of(y.dtype())) + "; both must be equal");
    y.gradient()->accumulate(from);
  }
  dy.clear();  // drops the second owner of the memory, so that the first backward may run in place
  tape.backward_from_gradients();
}

}  // namespace

Tensor run_checkpointed(Context& context, std::function<Tensor()> region, Module* module) {
  Tape* const tape = context.tape();
  if (tape == nullptr) return region();
  Tensor y;
  {
    // Marks outputs that require a gradient and lets hooks see that a backward follows, but records no nodes.
    Tape forgetful(tape->phase(), Tape::RecordMode::nothing);
    const TapeScope recording(context, &forgetful);
    y = region();
  }
  if (!y.requires_grad()) return y;
  // A separate handle: `y` may be one of the region's inputs.
  Tensor result = y.detached();
  result.set_requires_grad(true);
  tape->record("checkpoint", result,
               [kept = Region{context, std::move(region), module, context.forward_state()}, dy = result.gradient()] {
                 backward(kept, *dy);
               });
  return result;
}

int checkpoint_activations(Module& model, const std::function<bool(const Module&)>& which) {
  int picked = 0;
  for (Module* module : model.modules()) {
    const bool pick = which ? which(*module) : module->is_block();
    module->checkpoint_activations(pick);
    picked += pick ? 1 : 0;
  }
  if (picked == 0)
    throw InvalidUsage(which ? "checkpoint_activations: no module was picked"
                             : "checkpoint_activations: the model has no blocks; name the modules");
  return picked;
}

}  // namespace tessera::nn
