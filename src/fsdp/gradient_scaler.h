// Dynamic loss scaling for training in f16: as large as gradients allow, so that small gradients do not underflow.
//
//   fsdp::GradientScaler scaler(engine);                     // engine's options: .use_loss_scaling = true
//   for (...) {
//     ... tape.backward(loss, scaler.scale());
//     engine.step(learning_rate);
//     scaler.after_step();
//   }
//
// Source: dynamic loss scaling as in Micikevicius et al., arXiv 1710.03740, section 3.2, with the numbers of PyTorch's
// GradScaler. The gradient norm over all ranks shows whether a gradient of any rank is not finite, so all ranks skip
// the same steps without a separate vote.
#pragma once

#include <cstdint>

#include "tessera/fsdp/engine.h"

namespace tessera::fsdp {

/// How the scale changes. The defaults are PyTorch's.
struct GradientScalerOptions {
  double initial = 65536;        ///< the first scale
  double growth = 2;             ///< factor after `interval` steps in a row without a skipped one
  double backoff = 0.5;          ///< factor after a skipped step
  std::int64_t interval = 2000;  ///< interval in steps
};

/// The state that a checkpoint saves.
struct GradientScalerState {
  double scale = 0;                                             ///< the factor on the loss of the next step
  std::int64_t good_steps = 0;                                  ///< finite steps in a row
  std::uint64_t skipped_steps = 0;                              ///< skipped steps in total
  bool operator==(const GradientScalerState&) const = default;  ///< compares all members
};

/// Used by one engine's thread. Every rank has one, and all ranks make the same calls.
class TESSERA_API GradientScaler {
 public:
  using Options = GradientScalerOptions;  ///< the constructor's options
  using State = GradientScalerState;      ///< see state()

  /// Throws InvalidUsage for invalid options, or an engine without use_loss_scaling.
  explicit GradientScaler(Engine& engine, Options options = {});

  /// The initial gradient of the loss, to be multiplied by the loss's share of the step.
  double scale() const { return state_.scale; }
  /// Call after each Engine::step(). Returns true if the step changed the parameters; otherwise the optimizer has not
  /// counted it, and the scale is reduced. Waits, as grad_norm() does.
  bool after_step();

  const State& state() const { return state_; }  ///< state to be saved in a checkpoint; the same on every rank
  /// Also sets the engine's number of skipped steps.
  void set_state(const State& state);

 private:
  Engine& engine_;
  const Options options_;
  State state_;
};

}  // namespace tessera::fsdp
