// The loss scale of a training in f16: as large as gradients allow, so that small ones don't vanish.
//
//   fsdp::GradientScaler scaler(engine);                     // engine's options: .use_loss_scaling = true
//   for (...) {
//     ... tape.backward(loss, scaler.scale());
//     engine.step(learning_rate);
//     scaler.after_step();
//   }
//
// Source: dynamic loss scaling as in Micikevicius et al., arXiv 1710.03740, section 3.2, with the numbers of PyTorch's
// GradScaler. The norm that the ranks form together says whether a gradient of any of them isn't finite, so all of them
// skip the step, and no vote is needed.
#pragma once

#include <cstdint>

#include "tessera/fsdp/engine.h"

namespace tessera::fsdp {

struct GradientScalerOptions {
  double initial = 65536;
  double growth = 2;     ///< factor after `interval` steps in a row without a skipped one
  double backoff = 0.5;  ///< factor after a skipped step
  std::int64_t interval = 2000;
};

/// What a checkpoint keeps of it.
struct GradientScalerState {
  double scale = 0;
  std::int64_t good_steps = 0;      ///< in a row
  std::uint64_t skipped_steps = 0;  ///< of all
  bool operator==(const GradientScalerState&) const = default;
};

/// Belongs to one engine and its thread; every rank has one, and all do the same.
class TESSERA_API GradientScaler {
 public:
  using Options = GradientScalerOptions;
  using State = GradientScalerState;

  /// Throws InvalidUsage for options that make no sense, or an engine without use_loss_scaling.
  explicit GradientScaler(Engine& engine, Options options = {});

  /// What the loss's gradient begins with, times the loss's share of the step.
  double scale() const { return state_.scale; }
  /// After each Engine::step(): true where it changed the parameters. Else the optimizer has not counted it, and the
  /// scale is smaller. Waits, as grad_norm() does.
  bool after_step();

  const State& state() const { return state_; }
  /// Also the engine's skipped steps, of those that it has done.
  void set_state(const State& state);

 private:
  Engine& engine_;
  const Options options_;
  State state_;
};

}  // namespace tessera::fsdp
