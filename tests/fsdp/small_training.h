// A short training of two blocks, for tests that read values and gradients between its steps.
#pragma once

#include "tests/harness/training.h"

namespace tessera::fsdp {

using harness::engine_for;
using harness::TrainingSpec;

inline TrainingSpec spec_for(const std::string& strategy, int ranks) {
  TrainingSpec spec;
  spec.ranks = ranks;
  spec.global_batch = 2 * ranks;
  spec.model.layers = 2;
  spec.steps = 5;
  spec.engine = engine_for(strategy);
  spec.engine.measure_norm = true;
  return spec;
}

inline constexpr const char* kStrategies[] = {"ddp", "zero1", "zero2", "fsdp", "shard_grad_op", "hsdp"};

inline bool is_attention(const nn::Parameter& parameter) {
  return parameter.name().find(".attn.") != std::string::npos;
}

using Values = std::map<std::string, std::vector<float>>;

inline Values values_of(Engine& engine) {
  Values values;
  engine.state().for_each_parameter(
      [&](const nn::Parameter& p, std::span<const float> v) { values[p.name()].assign(v.begin(), v.end()); });
  return values;
}

}  // namespace tessera::fsdp
