#include "tessera/fsdp/gradient_scaler.h"

#include <cmath>

namespace tessera::fsdp {

GradientScaler::GradientScaler(Engine& engine, Options options) : engine_(engine), options_(options) {
  if (!(options_.growth > 1) || !(options_.backoff > 0) || !(options_.backoff < 1) || options_.interval < 1)
    throw InvalidUsage("gradient scaler: growth " + std::to_string(options_.growth) + ", backoff " +
                       std::to_string(options_.backoff) + ", interval " + std::to_string(options_.interval) +
                       "; growth must be above 1, backoff between 0 and 1, interval 1 or more");
  set_state({.scale = options_.initial});
}

void GradientScaler::set_state(const State& state) {
  engine_.state().set_steps(engine_.steps(), state.skipped_steps);
  engine_.set_loss_scale(state.scale);
  state_ = state;
}

bool GradientScaler::after_step() {
  State next = state_;
  const bool done = std::isfinite(engine_.grad_norm());
  if (!done) {
    next = {.scale = state_.scale * options_.backoff, .skipped_steps = state_.skipped_steps + 1};
  } else if (++next.good_steps == options_.interval) {
    next.scale *= options_.growth;
    next.good_steps = 0;
  }
  // A scale near the limits of f32 would itself cause overflow or underflow.
  next.scale = std::fmin(std::fmax(next.scale, 0x1p-24), 0x1p96);
  set_state(next);
  return done;
}

}  // namespace tessera::fsdp
